"""The run spec: one TOML file that says everything about a run. It never changes after the run was created.

Unknown keys are refused. docs/settings.md lists every key (generated from these classes, and tested).
"""
