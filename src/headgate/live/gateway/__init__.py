"""The gateway: front ends that turn requests into calls, and calls into answers."""
