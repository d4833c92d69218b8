"""The application file: what users declare, and how it becomes the core's records."""

from headgate.app.loaded import (
    LoadedApp,
    PolicyChoice,
    SimulationChoice,
    StreamChoice,
    WorkloadChoice,
)
from headgate.app.loader import declare, from_spec, load
from headgate.app.settings import make_config

__all__ = [
    "LoadedApp",
    "PolicyChoice",
    "SimulationChoice",
    "StreamChoice",
    "WorkloadChoice",
    "declare",
    "from_spec",
    "load",
    "make_config",
]
