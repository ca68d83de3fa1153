"""Speed as a ratio against a named competitor, measured in one interleaved run."""
