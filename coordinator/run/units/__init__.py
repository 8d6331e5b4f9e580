"""Work units: which worker trains on which part of the data, and the check that each unit was trained on once."""
