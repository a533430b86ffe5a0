"""The command line, `rlt`: `cli/main.py` runs it."""
