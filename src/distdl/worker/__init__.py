"""What every rank runs: the start-up, the build of the run, and measured choices."""
