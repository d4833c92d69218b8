"""The experiments, one file each: what a paper says, beside what comes out here.

There is no list to edit. A file without a leading underscore is an experiment, and its name is the
file's with hyphens; `experiment.py` says what an experiment is.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from headgate.core.errors import ConfigError
from headgate.lab.experiments.experiment import Experiment


def experiment_names() -> list[str]:
    """Every experiment there is.

    >>> "kaas-traces" in experiment_names()
    True
    """
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(__path__)
        if not module.ispkg and not module.name.startswith("_") and module.name != "experiment"
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
