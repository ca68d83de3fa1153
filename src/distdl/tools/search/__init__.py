"""A search over runs: an engine proposes values, and each trial is an ordinary frozen run."""
