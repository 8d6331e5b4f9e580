"""What the REST interface and the metrics show of a run (run_reports.py), of its rounds (round_reports.py), and of what
its workers waited for (waits.py)."""
