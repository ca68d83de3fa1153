"""Proves that a run survives faults: injects them into copies of it, and compares the results."""
