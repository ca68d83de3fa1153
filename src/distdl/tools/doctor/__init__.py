"""Examines the ranks, hosts and links of a job before it trains (docs/doctor.md)."""

FILE = "doctor.json"
