"""Prepared data sets: the shard format, its cache, and the sources that they are made from."""
