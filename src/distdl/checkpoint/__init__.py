"""Durable checkpoints, and every strategy's form of them as one portable form."""
