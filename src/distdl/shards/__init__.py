"""Image data sets as tar shards with an index: the format, and how it is written and read."""
