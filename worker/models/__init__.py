"""What is trained: models as the run spec describes them."""
