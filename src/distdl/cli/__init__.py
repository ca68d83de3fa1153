"""The command line: one file per verb, with its arguments, one call, and its output."""
