"""Shared by the experiments on the HiPS'21 paper (`hybrid_characterisation`, `hybrid_*ms`).

Waves of simultaneous requests come to one instance, and functions take what exceeds its threshold.
"""
