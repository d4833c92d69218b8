"""The command line: what people type, what they read, and how it ends (0, 1 or 2)."""
