"""Colours of the lines in plots."""

LINES = ["#2f7ed8", "#e8743b", "#19a979", "#945ecf", "#d64577", "#848f1a", "#0f9ba8", "#8a6d3b"]
