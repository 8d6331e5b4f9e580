"""The data plane, in the order in which a contribution passes through it: contributing, publishing (aggregating), outer
state, checkpointing, retention."""
