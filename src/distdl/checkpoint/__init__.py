"""Durable checkpoints, and one portable form for the checkpoints of every strategy."""
