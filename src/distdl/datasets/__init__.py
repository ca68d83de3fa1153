"""Prepared data sets: the shard format, its cache, and the formats that sets are made from."""
