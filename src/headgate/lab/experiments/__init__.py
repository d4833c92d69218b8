"""Experiments, one module each: the claims of a paper, compared with results of this simulator.

Experiments are discovered: there is no list to edit. A module without a leading underscore is an
experiment, named like the module with hyphens. `experiment.py` defines the interface.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from headgate.core.errors import ConfigError
from headgate.lab.experiments.experiment import Experiment


def experiment_names() -> list[str]:
    """Return the names of all experiments, sorted.

    >>> "kaas-traces" in experiment_names()
    True
    """
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if not module.ispkg and not module.name.startswith("_") and module.name != "experiment"
    )


def find_experiment(name: str) -> Experiment:
    """Return an experiment by name. Raises `ConfigError` that lists the known names."""
    names = experiment_names()
    if name not in names:
        raise ConfigError(
            "unknown experiment", key="experiment", value=name, allowed=", ".join(names)
        )
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    experiment = cast(Experiment, module)  # the module has the three attributes of the protocol
    if name != experiment.NAME:
        raise TypeError(f"{module.__name__}.NAME is {experiment.NAME!r}, not {name!r}")
    return experiment
