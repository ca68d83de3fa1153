"""The rank of this process, the signals that end it, and how it exits; without torch."""
