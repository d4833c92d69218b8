"""Metrics, logs and traces of a gateway.

Counting is cheap per request; sums are made per scrape.
"""
