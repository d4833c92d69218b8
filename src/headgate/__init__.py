"""Headgate serves and simulates ML inference under latency and cost objectives."""

__version__ = "0.22.0"
