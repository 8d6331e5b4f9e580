"""The run spec: one TOML file that describes a run completely. It never changes after the run was created.

Unknown keys are rejected. docs/settings.md lists every key (generated from these classes, and tested).
"""
