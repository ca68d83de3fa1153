"""Starts the ranks of one node, keeps a standby process, relays their output."""
