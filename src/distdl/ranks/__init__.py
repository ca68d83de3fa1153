"""Which rank this process is, the signals that end it, and how it exits; no torch."""
