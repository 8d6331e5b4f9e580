"""Token sets: tokenizers, shards of token ids with an index, and how both are made from text."""
