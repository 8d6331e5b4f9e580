"""What token sets are: a tokenizer, the index of the shards, and files of ids, read and verified."""
