"""The launchers: one file or folder per platform, and their shared code in `common`."""
