"""The experiments, one file each: what a paper says, beside what comes out here.

There is no list to edit. A file without a leading underscore is an experiment, and its name is the
file's with hyphens; `experiment.py` says what an experiment is.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from headgate.core.errors import ConfigError
from headgate.experiments.experiment import Experiment


def experiment_names() -> list[str]:
    """Every experiment there is.

    >>> "kaas-traces" in experiment_names()
    True
    """
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(
        name.replace("_", "-")
        for name in modules
        if not name.startswith("_") and name != "experiment"
    )


def find_experiment(name: str) -> Experiment:
    """Return the experiment of that name, or raise `ConfigError` listing those there are."""
    names = experiment_names()
    if name not in names:
        raise ConfigError(
            "unknown experiment", key="experiment", value=name, allowed=", ".join(names)
        )
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    experiment = cast(Experiment, module)  # a module can be one: it has the three attributes
    if name != experiment.NAME:
        raise TypeError(f"{module.__name__}.NAME is {experiment.NAME!r}, not {name!r}")
    return experiment
