"""`python -m meshmend` is the command line."""

from meshmend.cli.main import main

main()
