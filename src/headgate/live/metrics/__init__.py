"""What a gateway tells Prometheus: counted per request for next to nothing, added up when asked."""

from headgate.live.metrics.exposition import Exposition
from headgate.live.metrics.readings import Readings
from headgate.live.metrics.recorder import Metrics
from headgate.live.metrics.responses import Responses

__all__ = ["Exposition", "Metrics", "Readings", "Responses"]
