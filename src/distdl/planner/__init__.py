"""Estimates memory and traffic of a step under each strategy, and recommends one."""
