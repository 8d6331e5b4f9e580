"""Where text comes from: the files of this machine or the hub, in tasks that any process can read by itself."""
