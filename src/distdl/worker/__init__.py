"""What every rank runs: the start-up, building the run, and settings chosen by measurement."""
