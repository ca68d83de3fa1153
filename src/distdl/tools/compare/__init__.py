"""Runs beside each other: what differs, metrics with their curves, speed, cost, and a page."""
