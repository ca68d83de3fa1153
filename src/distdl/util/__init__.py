"""Helpers for every other package: errors, suggestions, redaction, safe files, processes."""
