"""Memory and traffic of a step on paper: which strategy fits."""
