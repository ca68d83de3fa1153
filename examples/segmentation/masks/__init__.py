"""Semantic segmentation, as a domain that distdl does not know."""
