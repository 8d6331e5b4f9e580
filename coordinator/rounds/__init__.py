"""The lifecycle of a run: rounds open, fragments close, and the operator pauses, resumes, drains or stops the run."""
