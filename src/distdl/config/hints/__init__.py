"""Words of other tools and what to write instead: tables in YAML, and what finds words in them."""
