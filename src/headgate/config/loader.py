"""Loads an application: from a YAML file, from a Python module, or from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import msgspec
from msgspec import inspect

from headgate.config.build import build, variant_sources
from headgate.config.errors import check
from headgate.config.options import (
    AppConfig,
    client_options,
    default_workload,
    policy_options,
    serve_options,
    simulation_options,
)
from headgate.config.schema import AppSpec
from headgate.config.source import normalise, read_yaml
from headgate.core.errors import ConfigError


def load(reference: str) -> AppConfig:
    """Load a YAML file (`app.yaml`), or `module:attribute`, which is an `AppConfig` or a mapping.

    Raises `ConfigError` if the application is not valid, or if importing the module fails or
    exits. Any other exception that the module raises on import is passed on.
    """
    if ":" not in reference or reference.endswith((".yaml", ".yml")):
        return _from_data(read_yaml(reference), reference)
    value = _attribute(reference)
    return value if isinstance(value, AppConfig) else _from_data(value, reference)


def from_spec(spec: Mapping[str, object], where: str) -> AppConfig:
    """Load an application from plain data, as a YAML file would contain; errors name `where`."""
    return _from_data(spec, where)


def declare(
    functions: Mapping[str, object], pools: Mapping[str, object], **sections: object
) -> AppConfig:
    """Declare an application in Python, with the same nested mappings as in the YAML file.

    >>> config = declare(functions={"resnet": {"exec_time": "5ms"}}, pools={"gpu": {"nodes": 4}})
    >>> config.app.pipelines[0].name, config.policy.name
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
        workload=default_workload(spec.workload, app, where),
        simulation=simulation_options(spec.simulation, app, where),
        sources=variant_sources(spec.functions),
        serve=serve_options(spec.serve, where),
        tenants=client_options(spec.clients, where),
        spec=normalised,
    )


def _attribute(reference: str) -> object:
    """Return what `module:attribute` names."""
    module_name, _, path = reference.partition(":")
    allowed = "app.yaml, module:attribute"
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError("is not a module name", where=reference, allowed=allowed)
    try:
        value: object = import_module(module_name)
    except (ImportError, SystemExit) as error:
        kind = "the module exits: " if isinstance(error, SystemExit) else ""
        problem = " ".join(f"cannot be imported: {kind}{error}".split())
        raise ConfigError(problem, where=reference) from None
    for name in path.split("."):
        if not hasattr(value, name):
            raise ConfigError(f"has no attribute {name!r}", where=reference, allowed=allowed)
        value = getattr(value, name)
    return value


def without_defaults(spec: Mapping[str, object]) -> object:
    """Return plain data that loads as the same application, without its default values.

    >>> function = {"exec_time": "5ms", "cold_start": 0}
    >>> without_defaults({"functions": {"f": function}, "policy": "headgate"})
    {'functions': {'f': {'exec_time': '5ms'}}}
    """
    return _without_defaults(msgspec.convert(spec, AppSpec))


def _without_defaults(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {
            field.name: _without_defaults(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, dict):
        return {key: _without_defaults(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_without_defaults(inner) for inner in value]
    return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
