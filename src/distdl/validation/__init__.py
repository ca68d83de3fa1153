"""What is wrong with a config, found before anything starts."""
