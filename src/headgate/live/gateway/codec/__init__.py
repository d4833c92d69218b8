"""Reads and writes long texts in other processes, so that the event loop stays responsive."""
