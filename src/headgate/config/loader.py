"""Loads an application: from a YAML file, from a Python module, or from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import msgspec
from msgspec import inspect

from headgate.config.build import build, find_sources
from headgate.config.errors import check
from headgate.config.options import (
    AppConfig,
    declared_clients,
    declared_workload,
    policy_options,
    serve_options,
    simulation_options,
)
from headgate.config.schema import AppSpec
from headgate.config.source import normalise, read_yaml
from headgate.core.errors import ConfigError


def load(reference: str) -> AppConfig:
    """Load a YAML file (`app.yaml`), or what `module:attribute` names: a `AppConfig` or a mapping.

    Raises `ConfigError` if there is anything wrong with it. What the module itself raises when it
    is imported comes through, but for a failing import and for an exit.
    """
    if ":" not in reference or reference.endswith((".yaml", ".yml")):
        return _from_data(read_yaml(reference), reference)
    found = _attribute(reference)
    return found if isinstance(found, AppConfig) else _from_data(found, reference)


def from_spec(spec: Mapping[str, object], where: str) -> AppConfig:
    """Load what a YAML file would contain; `where` is named in errors."""
    return _from_data(spec, where)


def declare(
    functions: Mapping[str, object], pools: Mapping[str, object], **sections: object
) -> AppConfig:
    """Declare an application in Python: the same nested mapping as in the YAML file.

    >>> loaded = declare(functions={"resnet": {"exec": "5ms"}}, pools={"gpu": {"nodes": 4}})
    >>> loaded.app.pipelines[0].name, loaded.policy.name
    ('resnet', 'headgate')
    """
    return from_spec({"functions": functions, "pools": pools, **sections}, "declare()")


def _from_data(data: object, where: str) -> AppConfig:
    written = normalise(data, where)
    try:
        spec = msgspec.convert(written, AppSpec)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(AppSpec), where=where, key="")
        raise ConfigError(str(error), where=where) from None
    app = build(spec, where)
    normalised = normalise(msgspec.to_builtins(spec), where)
    assert isinstance(normalised, dict)
    return AppConfig(
        app=app,
        policy=policy_options(spec.policy, where),
        workload=declared_workload(spec.workload, app, where),
        simulation=simulation_options(spec.simulation, app, where),
        sources=find_sources(spec.functions),
        serve=serve_options(spec.serve, where),
        tenants=declared_clients(spec.clients, where),
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


# An application as somebody would have written it: without what is assumed anyway.


def without_defaults(spec: Mapping[str, object]) -> object:
    """Return plain data that loads as the same application, without its defaults.

    >>> without_defaults({"functions": {"f": {"exec": "5ms", "start": 0}}, "policy": "headgate"})
    {'functions': {'f': {'exec': '5ms'}}}
    """
    return _brief(msgspec.convert(spec, AppSpec))


def _brief(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {
            field.name: _brief(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, dict):
        return {key: _brief(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_brief(inner) for inner in value]
    return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
