"""`python -m speedkit`."""

from speedkit.cli import main

main()
