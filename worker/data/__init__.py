"""What is trained on: sources of text, tokens in sequences, sequences in numbered work units."""
