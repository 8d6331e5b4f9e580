"""`python -m outerstep` is the same as the command `outerstep`."""

from outerstep.cli import main

main()
