"""Writes prepared data sets: sources, the plan of the shards, writers, upload."""
