"""The settings of a policy: from plain data to its frozen configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from headgate.app.explain import check
from headgate.app.names import unknown
from headgate.app.plain import plain
from headgate.core import units
from headgate.core.errors import ConfigError
from headgate.core.policy import PolicyConfig

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)

_NS = "_ns"


def make_config(config_type: type[ConfigT], settings: Mapping[str, object], where: str) -> ConfigT:
    """Make the configuration of a policy of what was written under `policy:`.

    A field `window_ns` is written `window: 5s`. Raises `ConfigError` for an unknown key, a value
    of the wrong type, and whatever the configuration itself refuses with a `ValueError`.
    """
    hints = get_type_hints(config_type)
    names = {
        field.name.removesuffix(_NS): field.name for field in fields(config_type) if field.init
    }
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in names:
            raise unknown("setting", key, names, where=where, key="policy")
        name = names[key]
        values[name] = _read(value, name, hints[name], where, f"policy.{key}")
    try:
        return config_type(**values)
    except ConfigError as error:
        raise ConfigError(
            error.problem,
            where=where,
            key=f"policy.{error.key}" if error.key else "policy",
            value=error.value,
            allowed=error.allowed,
        ) from None
    except ValueError as error:
        raise ConfigError(str(error), where=where, key="policy") from None


def _read(value: object, name: str, hint: object, where: str, key: str) -> object:
    if name.endswith(_NS) and value is not None:
        value = units.parse_duration(value, where=where, key=key)
    written = plain(value, where, key)
    try:
        return msgspec.convert(written, hint)
    except msgspec.ValidationError as error:
        check(written, inspect.type_info(hint), where=where, key=key)
        raise ConfigError(str(error), where=where, key=key, value=value) from None
