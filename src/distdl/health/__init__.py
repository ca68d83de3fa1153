"""Watches the ranks of a running job, and explains how a job failed."""
