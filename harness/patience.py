"""How long to wait for what must come. It only turns a hang into a failure: no result depends on it, however busy the
machine is."""

PATIENCE_S = 300.0
