"""Prepared data sets: the shard format, its cache, reading; which files are images."""
