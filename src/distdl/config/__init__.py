"""Hydra's compose, the typed sections of a config, and what follows from them."""
