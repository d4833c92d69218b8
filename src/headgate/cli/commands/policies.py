"""`headgate policies`: lists the policies, their capabilities and settings."""

from __future__ import annotations

from dataclasses import asdict, fields

import click
from rich.text import Text

from headgate.cli.options import json_option
from headgate.cli.output import hanging_indent, show, show_json
from headgate.core.policy import PolicyConfig
from headgate.core.units import format_duration
from headgate.policies import describe_policy, find_policy, policy_names


@click.command("policies")
@json_option
def command(as_json: bool) -> None:
    """List the policies: what each does, its capabilities, and its settings."""
    names = policy_names()
    if as_json:
        show_json([_to_json(name) for name in names])
        return
    width = max(map(len, names)) + 2
    for name in names:
        kind = find_policy(name)
        capabilities = [flag for flag, value in asdict(kind.capabilities).items() if value]
        bounds = _bounds(kind.config)
        settings = [
            f"{key}={_yaml(value)}" + (f" ({bounds[key]})" if key in bounds else "")
            for key, value in _settings(kind.config()).items()
        ]
        show(
            hanging_indent(name, width, describe_policy(name), "bold"),
            hanging_indent(
                "", width, Text(f"supports {', '.join(capabilities)}".replace("_", " "), "dim")
            ),
            hanging_indent("", width, Text(f"settings {', '.join(settings) or 'none'}", "dim")),
        )
    show(Text("\nheadgate simulate APP --policy NAME --set KEY=VALUE"))


def _to_json(name: str) -> dict[str, object]:
    kind = find_policy(name)
    return {
        "name": name,
        "about": describe_policy(name),
        "capabilities": asdict(kind.capabilities),
        "settings": _settings(kind.config()),
        "bounds": _bounds(kind.config),
    }


def _settings(config: PolicyConfig) -> dict[str, object]:
    """Return the defaults as settings: the field `window_ns` is the setting `window`."""
    settings: dict[str, object] = {}
    for field in fields(config):
        value: object = getattr(config, field.name)
        if field.name.endswith("_ns") and isinstance(value, int):
            value = format_duration(value)
        settings[field.name.removesuffix("_ns")] = value
    return settings


def _bounds(config: type[PolicyConfig]) -> dict[str, str]:
    """Return the values that the settings with bounds may have."""
    return {
        field.name.removesuffix("_ns"): str(field.metadata["bounds"])
        for field in fields(config)
        if "bounds" in field.metadata
    }


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
