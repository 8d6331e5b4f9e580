"""How a token set is made: tasks of text, tokenised by several processes, appended to shards, resumed after a kill."""
