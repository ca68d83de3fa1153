"""How a job failed: what its ranks left, the cause, the report."""
