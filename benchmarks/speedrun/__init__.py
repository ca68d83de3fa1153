"""Records that anyone can repeat: the most accurate training in the first recipe's CPU time."""
