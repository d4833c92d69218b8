"""The JSON Schema of the application file, for editors and for other tools.

`schema.json` beside this file is generated; write it anew with `python -m headgate.app.schema`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec

from headgate.app.spec import AppSpec

SCHEMA_PATH: Final = Path(__file__).with_name("schema.json")


def json_schema() -> dict[str, object]:
    """Return the schema that every application file conforms to.

    It knows shapes and ranges. What relates one part of the file to another (a stage and its
    function, say) is checked on loading only.
    """
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, **msgspec.json.schema(AppSpec)}
    return msgspec.json.decode(msgspec.json.encode(schema), type=dict[str, object])


def schema_text() -> str:
    """Return the content of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
