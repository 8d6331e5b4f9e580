"""Sources of text: files of this machine or data sets of the hub, as tasks that any process can read independently."""
