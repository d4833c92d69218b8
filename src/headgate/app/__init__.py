"""The application file: what users declare, and how it becomes the core's records."""

from headgate.app.loaded import (
    ClientChoice,
    LoadedApp,
    PolicyChoice,
    ServeChoice,
    SimulationChoice,
    StreamChoice,
    WorkloadChoice,
)
from headgate.app.loader import declare, from_spec, load
from headgate.app.serve import without_keys
from headgate.app.settings import make_config

__all__ = [
    "ClientChoice",
    "LoadedApp",
    "PolicyChoice",
    "ServeChoice",
    "SimulationChoice",
    "StreamChoice",
    "WorkloadChoice",
    "declare",
    "from_spec",
    "load",
    "make_config",
    "without_keys",
]
