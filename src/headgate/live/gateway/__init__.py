"""The gateway: front ends that turn requests into calls, and results into responses."""
