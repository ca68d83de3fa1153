"""The command line: a file per verb with its arguments, one call, and what is printed."""
