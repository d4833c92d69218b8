"""What a gateway tells Prometheus: counted per request for next to nothing, added up when asked."""

from headgate.live.telemetry.metrics import GaugeSnapshot, Metrics, Responses
from headgate.live.telemetry.prometheus import Exposition

__all__ = ["Exposition", "GaugeSnapshot", "Metrics", "Responses"]
