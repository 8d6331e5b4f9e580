"""What workers ask and tell: to join, to be assigned their next round, to leave; what a round has cost them."""
