"""The data plane, in the order of the way: contributing → aggregating → publishing → outer state → checkpointing."""
