"""Benchmarks: each prints a table, and one JSON line with --json. Speeds are ratios within one run, never tests."""
