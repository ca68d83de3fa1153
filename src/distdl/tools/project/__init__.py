"""A new project of the user's: `distdl new project`."""
