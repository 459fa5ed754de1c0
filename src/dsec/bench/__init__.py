"""The `dsec bench` commands: what SPECIFICATION.md promises, measured against references in the same run."""
