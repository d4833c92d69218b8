"""Offline capacity planning: the cheapest mix of instances and FaaS for a load."""
