"""Capacity planning ahead of time: the cheapest mix of instances and functions for a load."""
