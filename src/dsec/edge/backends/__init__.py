"""Ways to start a sandbox, one module each; they do not know each other."""
