"""What follows from the schema: the JSON Schema, tables for documents, options of commands.

`schema.json` in this directory is generated: `headgate schema > src/headgate/config/schema.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct, inspect

from headgate.config.decoding import default_of, read_as, type_info, write
from headgate.config.schema import AppSpec


@dataclass(frozen=True, slots=True)
class SchemaKey:
    """An optional key of a section of the application file, as people need to know it."""

    key: str
    kind: inspect.Type
    default: object  # as a file has it
    description: str

    @property
    def default_text(self) -> str | None:
        """The default as a file has it, in one word; None if there is none."""
        if self.default is None:
            return None
        return self.default if isinstance(self.default, str) else json.dumps(self.default)

    @property
    def placeholder(self) -> str:
        """What stands for the value in a help text: `DURATION`, `N`, `text|json`."""
        return _placeholder(self.kind)

    def check(self, value: object, where: str) -> None:
        """Raise `ConfigError` if the key may not have this value."""
        read_as(value, self.kind, where, "")


def keys_of(section: type[Struct]) -> list[SchemaKey]:
    """Return the optional keys of a section, in the order of their declaration."""
    kind = type_info(section)
    assert isinstance(kind, inspect.StructType)
    return [
        SchemaKey(
            field.encode_name,
            field.type,
            write(default_of(field), field.type),
            str((getattr(field.type, "extra_json_schema", None) or {}).get("description", "")),
        )
        for field in kind.fields
        if not field.required
    ]


def _placeholder(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(extra_json_schema={"title": title}):
            return str(title).upper()
        case inspect.Metadata(type=inner) | inspect.UnionType(types=(inner, inspect.NoneType())):
            return _placeholder(inner)
        case inspect.LiteralType(values=values):
            return "|".join(map(str, values))
        case inspect.IntType():
            return "N"
    return "TEXT"


def markdown_table(section: type[Struct]) -> str:
    """Return the optional keys of a section as a table for a document."""
    rows = ["| key | default | what |", "| --- | --- | --- |"]
    for setting in keys_of(section):
        default = "none" if setting.default is None else f"`{setting.default_text}`"
        rows.append(f"| `{setting.key}` | {default} | {setting.description} |")
    return "\n".join(rows) + "\n"


def json_schema() -> dict[str, object]:
    """Return the JSON Schema that every application file conforms to.

    It knows shapes and ranges. What relates one part of the file to another (a stage and its
    function, say) is checked on loading only.
    """
    schema = msgspec.json.schema(AppSpec)
    for kind in _structs(type_info(AppSpec)):
        properties = schema["$defs"][kind.cls.__name__]["properties"]
        for each in kind.fields:
            if not each.required:
                properties[each.encode_name]["default"] = write(default_of(each), each.type)
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, **_with_written_quantities(schema)}
    return msgspec.json.decode(msgspec.json.encode(schema), type=dict[str, object])


def schema_text() -> str:
    """Return the content of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    """Yield the structs that a type consists of."""
    match kind:
        case inspect.Metadata(type=inner) | inspect.DictType(value_type=inner):
            yield from _structs(inner)
        case inspect.VarTupleType(item_type=inner):
            yield from _structs(inner)
        case inspect.UnionType(types=types):
            for inner in types:
                yield from _structs(inner)
        case inspect.StructType(fields=fields):
            yield kind
            for each in fields:
                yield from _structs(each.type)


def _with_written_quantities(node: Any) -> Any:
    """Replace the type of each quantity in a JSON Schema by that of the written value."""
    if isinstance(node, list):
        return [_with_written_quantities(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    if "written" not in node:
        return {key: _with_written_quantities(inner) for key, inner in node.items()}
    of_number = ("written", "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return {key: v for key, v in node.items() if key not in of_number} | node["written"]
