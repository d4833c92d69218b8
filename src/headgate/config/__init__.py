"""The application file: what users declare, and how it becomes the core's records."""

from headgate.config.build import make_config
from headgate.config.loader import declare, from_spec, load
from headgate.config.options import (
    AppConfig,
    ArrivalStream,
    DefaultWorkload,
    PolicyOptions,
    SimulationOptions,
    without_keys,
)
from headgate.config.schema import ClientSpec, ServeSpec

__all__ = [
    "AppConfig",
    "ArrivalStream",
    "ClientSpec",
    "DefaultWorkload",
    "PolicyOptions",
    "ServeSpec",
    "SimulationOptions",
    "declare",
    "from_spec",
    "load",
    "make_config",
    "without_keys",
]
