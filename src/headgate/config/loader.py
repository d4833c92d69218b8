"""Loads an application: from a YAML file, from a Python module, or from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec
from msgspec import inspect

from headgate.config.build import build, variant_sources
from headgate.config.decoding import decode, default_of, type_info
from headgate.config.options import (
    AppConfig,
    check_clients,
    check_serve,
    default_workload,
    policy_options,
    simulation_options,
)
from headgate.config.providers import choose_providers
from headgate.config.schema import AppSpec
from headgate.config.source import read_yaml
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
    spec, plain = decode(data, AppSpec, where)
    providers = choose_providers(spec.pools, where)
    app = build(spec, where)
    check_serve(spec.serve, where)
    check_clients(spec.clients, where)
    return AppConfig(
        app=app,
        policy=policy_options(spec.policy, where),
        workload=default_workload(spec.workload, app, where),
        simulation=simulation_options(spec.simulation, app, where),
        sources=variant_sources(spec.functions),
        serve=spec.serve,
        providers=providers,
        tenants=tuple(spec.clients.values()),
        spec=plain,
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
    decoded, plain = decode(spec, AppSpec, "the application")
    return _without_defaults(plain, decoded)


def _without_defaults(plain: Any, decoded: object) -> object:
    """Return the plain data of a decoded value, without what is the default."""
    match decoded:
        case msgspec.Struct():
            kind = type_info(type(decoded))
            assert isinstance(kind, inspect.StructType)
            return {
                field.encode_name: _without_defaults(
                    plain[field.encode_name], getattr(decoded, field.name)
                )
                for field in kind.fields
                if field.required or getattr(decoded, field.name) != default_of(field)
            }
        case dict():
            return {key: _without_defaults(plain[key], inner) for key, inner in decoded.items()}
        case tuple() | list():
            return [_without_defaults(p, inner) for p, inner in zip(plain, decoded, strict=True)]
    return plain
