"""dsec: self-hosted elastic sandboxes for AI agents."""
