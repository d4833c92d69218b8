"""Admission: which requests can be promised, where, in whose share, and at what cost."""
