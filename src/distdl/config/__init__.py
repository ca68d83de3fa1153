"""Composes a config with Hydra, checks its sections, and derives size, batches and recipe."""
