"""Searches and books of the papers' policies, which the default policy does not use."""
