"""What every other package may use: errors, suggestions, redaction, safe files, processes."""
