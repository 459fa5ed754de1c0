"""One edge a node: owns the truth of what runs there, and every sandbox's lifecycle and channel."""
