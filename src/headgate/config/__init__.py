"""The application file: what users declare, and how it becomes the core's records."""

from headgate.config.build import make_config
from headgate.config.loader import declare, from_spec, load
from headgate.config.options import (
    AppConfig,
    ArrivalStream,
    ClientOptions,
    DefaultWorkload,
    PolicyOptions,
    ServeOptions,
    SimulationOptions,
    without_keys,
)

__all__ = [
    "AppConfig",
    "ArrivalStream",
    "ClientOptions",
    "DefaultWorkload",
    "PolicyOptions",
    "ServeOptions",
    "SimulationOptions",
    "declare",
    "from_spec",
    "load",
    "make_config",
    "without_keys",
]
