"""Watches the ranks of a running job, and ends them when they hang."""
