"""Whether a data set is intact, and whether it feeds the devices."""
