"""An application as somebody would have written it: without what is assumed anyway."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headgate.app.spec import AppSpec


def brief(spec: Mapping[str, object]) -> object:
    """Return plain data that loads as the same application, without its defaults.

    >>> brief({"functions": {"f": {"exec": "5ms", "start": 0}}, "policy": "headgate"})
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
