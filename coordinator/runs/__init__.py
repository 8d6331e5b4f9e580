"""The control plane: a run, who takes part in it, what each does next, and when a round opens and closes."""
