"""Shared by the comparison of hybrid policies on traces (`hybrid_traces`)."""
