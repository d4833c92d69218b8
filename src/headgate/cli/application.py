"""Loading APP, as a command does it: from where the user stands, blaming the right file."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path

from headgate.app import LoadedApp, load
from headgate.core.errors import ConfigError


def load_app(reference: str) -> LoadedApp:
    """Load a YAML file, or `module:app` from the working directory or wherever Python looks."""
    if ":" in reference and not reference.endswith((".yaml", ".yml")):
        directory = str(Path.cwd())
        if directory not in sys.path:
            sys.path.insert(0, directory)
        _import(reference)
    return load(reference)


def _import(reference: str) -> None:
    """Import the module now, so that what its own code raises is the user's and not our defect."""
    name = reference.partition(":")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return  # `load` says so
    try:
        import_module(name)
    except ConfigError:
        raise
    except ImportError:
        return  # as above
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        if isinstance(error, SyntaxError):
            where = f"{error.filename}:{error.lineno}"
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(problem, where=where, key=reference) from None
