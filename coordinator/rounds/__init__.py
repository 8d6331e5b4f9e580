"""The lifecycle of a run: workers join, get assignments and leave, rounds open, fragments close, and the operator
pauses, resumes, drains or stops the run."""
