"""Metrics, logs and traces of a gateway.

Counting is cheap per request; sums are made per scrape.
"""

from headgate.live.telemetry.metrics import GaugeSnapshot, Metrics, Responses
from headgate.live.telemetry.prometheus import Exposition

__all__ = ["Exposition", "GaugeSnapshot", "Metrics", "Responses"]
