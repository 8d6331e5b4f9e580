"""The simulated world: its clock, machines, disks, database and store."""
