"""Pools: what their nodes can run at once, how long it takes, and what is promised of it."""
