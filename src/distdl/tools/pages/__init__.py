"""What HTML pages of runs are made of: a run's files, curves, tables, the style."""
