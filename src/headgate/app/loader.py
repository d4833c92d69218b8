"""Loads an application: from a YAML file, from a Python module, or from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import msgspec
from msgspec import inspect

from headgate.app.build import build
from headgate.app.choices import choose_policy, choose_simulation, choose_workload
from headgate.app.explain import check
from headgate.app.functions import find_sources
from headgate.app.loaded import LoadedApp
from headgate.app.plain import plain
from headgate.app.serve import choose_clients, choose_serve
from headgate.app.spec import AppSpec
from headgate.app.yaml_file import read_yaml
from headgate.core.errors import ConfigError


def load(reference: str) -> LoadedApp:
    """Load a YAML file (`app.yaml`), or what `module:attribute` names: a `LoadedApp` or a mapping.

    Raises `ConfigError` if there is anything wrong with it. What the module itself raises when it
    is imported comes through, but for a failing import and for an exit.
    """
    if ":" not in reference or reference.endswith((".yaml", ".yml")):
        return _from_data(read_yaml(reference), reference)
    found = _attribute(reference)
    return found if isinstance(found, LoadedApp) else _from_data(found, reference)


def from_spec(spec: Mapping[str, object], where: str) -> LoadedApp:
    """Load what a YAML file would contain; `where` is named in errors."""
    return _from_data(spec, where)


def declare(
    functions: Mapping[str, object], pools: Mapping[str, object], **sections: object
) -> LoadedApp:
    """Declare an application in Python: the same nested mapping as in the YAML file.

    >>> loaded = declare(functions={"resnet": {"exec": "5ms"}}, pools={"gpu": {"nodes": 4}})
    >>> loaded.app.pipelines[0].name, loaded.policy.name
    ('resnet', 'headgate')
    """
    return from_spec({"functions": functions, "pools": pools, **sections}, "declare()")


def _from_data(data: object, where: str) -> LoadedApp:
    written = plain(data, where)
    try:
        spec = msgspec.convert(written, AppSpec)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(AppSpec), where=where, key="")
        raise ConfigError(str(error), where=where) from None
    app = build(spec, where)
    normalised = plain(msgspec.to_builtins(spec), where)
    assert isinstance(normalised, dict)
    return LoadedApp(
        app=app,
        policy=choose_policy(spec.policy, where),
        workload=choose_workload(spec.workload, app, where),
        simulation=choose_simulation(spec.simulation, app, where),
        sources=find_sources(spec.functions),
        serve=choose_serve(spec.serve, where),
        tenants=choose_clients(spec.clients, where),
        spec=normalised,
    )


def _attribute(reference: str) -> object:
    """Return what `module:attribute` names."""
    module_name, _, path = reference.partition(":")
    allowed = "app.yaml, module:attribute"
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError("names no module", where=reference, allowed=allowed)
    try:
        found: object = import_module(module_name)
    except (ImportError, SystemExit) as error:
        kind = "it exits: " if isinstance(error, SystemExit) else ""
        problem = " ".join(f"cannot be imported: {kind}{error}".split())
        raise ConfigError(problem, where=reference) from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"has no attribute {name!r}", where=reference, allowed=allowed)
        found = getattr(found, name)
    return found
