"""A run's directory: its attempts, frozen config, code, provenance and failures."""
