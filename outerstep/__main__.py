"""The entry point of `python -m outerstep`, the same as the command `outerstep`."""

from outerstep.cli import main

main()
