"""Profiling: measures the latency of a function on this machine, or imports measurements.

A probe measures import times, so this package must import nothing by itself.
"""
