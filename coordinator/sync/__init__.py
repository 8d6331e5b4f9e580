"""The data plane, in the order of a contribution: contributing, publishing (aggregating), outer state, checkpointing,
retention."""
