"""Images with one class each."""
