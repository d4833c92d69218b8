"""Autoscaling: response times, and how many nodes an objective and a forecast call for."""
