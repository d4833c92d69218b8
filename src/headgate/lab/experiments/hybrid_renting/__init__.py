"""Shared by the comparison of hybrid policies on traces (`hybrid_traces`).

Policies rent instances and call functions as the load of an hour changes.
"""
