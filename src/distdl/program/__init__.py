"""A program in place of a training: variables, process, checkpoints, and how it ended."""
