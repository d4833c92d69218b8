"""Dispatch: which waiting tasks run together, on which node, in which shape."""
