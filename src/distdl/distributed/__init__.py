"""The process group, and what the ranks agree on through it."""
