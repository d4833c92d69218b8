"""Draws the lifecycles into the documents, from the tables that the code obeys.

    python tools/diagrams.py

rewrites what stands between `<!-- states: Task -->` and `<!-- end -->` in the document.
"""

from __future__ import annotations

import re
from pathlib import Path

from headgate.core import states as lifecycle
from headgate.core.states import Table, state_names

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "life-of-a-request.md"
MACHINES: dict[str, tuple[Table, type]] = {
    "Request": (lifecycle.REQUEST_TABLE, lifecycle.RequestState),
    "Task": (lifecycle.TASK_TABLE, lifecycle.TaskState),
    "Batch": (lifecycle.BATCH_TABLE, lifecycle.BatchState),
    "Instance": (lifecycle.INSTANCE_TABLE, lifecycle.InstanceState),
    "Residency": (lifecycle.RESIDENCY_TABLE, lifecycle.Residency),
    "Node": (lifecycle.NODE_TABLE, lifecycle.NodeState),
}


def diagram(table: Table, states: type) -> str:
    """Return a table as a Mermaid diagram: from the first state to those that nothing follows."""
    names = state_names(states)
    lines = ["stateDiagram-v2", f"    [*] --> {names[min(names)]}"]
    for before, following in table.items():
        lines += [f"    {names[before]} --> {names[after]}" for after in following]
        if not following:
            lines.append(f"    {names[before]} --> [*]")
    return "\n".join(lines)


def drawn(text: str) -> str:
    """Return a document with its diagrams drawn anew."""
    for name, (table, states) in MACHINES.items():
        fenced = f"<!-- states: {name} -->\n```mermaid\n{diagram(table, states)}\n```\n<!-- end -->"
        text, count = re.subn(f"<!-- states: {name} -->.*?<!-- end -->", fenced, text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{DOCUMENT.name}: {count} places for the states of {name}")
    return text


def main() -> None:
    """Rewrite the document."""
    DOCUMENT.write_text(drawn(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
