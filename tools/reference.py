"""Writes what follows from the schema: `schema.json`, and the table of `serve:` in the documents.

    python tools/reference.py

rewrites `src/headgate/config/schema.json`, and in `docs/serving.md` what stands between
`<!-- keys: serve -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from headgate.config.reference import markdown_table, schema_text
from headgate.config.schema import ServeSpec

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "serving.md"


def written(text: str) -> str:
    """Return a document with its table written anew."""
    table = f"<!-- keys: serve -->\n{markdown_table(ServeSpec)}<!-- end -->"
    text, count = re.subn(
        "<!-- keys: serve -->.*?<!-- end -->", lambda _: table, text, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{DOCUMENT.name}: {count} places for the keys of `serve:`")
    return text


def main() -> None:
    """Rewrite the files."""
    schema = ROOT / "src" / "headgate" / "config" / "schema.json"
    schema.write_text(schema_text(), encoding="utf-8")
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
