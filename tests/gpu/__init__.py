"""What a GPU must do as a CPU does: `make gpu`. Where there is none, the same in miniature, on the CPU."""
