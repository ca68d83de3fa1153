"""Where a run can happen: one file or folder per platform, and what they share."""
