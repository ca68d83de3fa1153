"""Checks whether a data set is intact, and whether it can be loaded fast enough for the devices."""
