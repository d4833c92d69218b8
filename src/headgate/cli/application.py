"""Loading APP, as a command does it: from where the user stands, blaming the right file."""

from __future__ import annotations

import copy
import sys
import traceback
from importlib import import_module
from pathlib import Path

import click

from headgate.app import LoadedApp, from_spec, load
from headgate.app.functions import variant_spec
from headgate.app.objectives import unreachable_objectives
from headgate.core.errors import ConfigError
from headgate.core.units import format_duration


def load_app(reference: str) -> LoadedApp:
    """Load a YAML file, or `module:app` from the working directory or wherever Python looks."""
    if ":" in reference and not reference.endswith((".yaml", ".yml")):
        directory = str(Path.cwd())
        if directory not in sys.path:
            sys.path.insert(0, directory)
        _import(reference)
    return load(reference)


def with_known_times(loaded: LoadedApp, where: str, assumed_ns: int | None) -> LoadedApp:
    """Return the application with a time for every function, or refuse: what nobody has measured
    cannot be simulated, unless the user says what to assume.
    """
    if not loaded.unmeasured:
        return loaded
    if assumed_ns is None:
        raise ConfigError(
            "is not known: nobody has measured it",
            where=where,
            key=f"{_key(loaded.unmeasured[0])}.exec",
            allowed=f"exec: 5ms, which headgate profile {where} finds; or --assume-exec 5ms",
        )
    spec = copy.deepcopy(loaded.spec)
    for name in loaded.unmeasured:
        entry = variant_spec(spec, name)
        entry["exec"] = [format_duration(assumed_ns)] * entry["batch"]
    return from_spec(spec, where)


def assumed_times(loaded: LoadedApp, assumed_ns: int | None) -> dict[str, str]:
    """Return what was assumed of whom, for the output; nothing if nothing was."""
    if assumed_ns is None:
        return {}
    return dict.fromkeys(loaded.unmeasured, format_duration(assumed_ns))


def _key(variant: str) -> str:
    function, _, own = variant.partition("/")
    return f"functions.{function}.variants.{own}" if own else f"functions.{function}"


def warn_of_objectives(loaded: LoadedApp, where: str) -> None:
    """Say on stderr which objectives nothing can meet: whoever asks for that may have reasons."""
    for problem in unreachable_objectives(loaded, where):
        click.echo(f"headgate: warning: {problem}", err=True)


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
