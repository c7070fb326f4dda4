"""The command line: `main.py` finds the command, `parser.py` reads its arguments, `commands/` has one file for each."""
