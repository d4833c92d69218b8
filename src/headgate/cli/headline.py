"""The numbers of one run side by side, in as many columns as the terminal has room for."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from headgate.metrics.sheet import headline_sheet
from headgate.metrics.summary import Summary

_GAP = 4


class Headline:
    """Names, values and units in three blocks: outcomes, times, resources; fewer if narrow."""

    def __init__(self, summary: Summary) -> None:
        self._rows = headline_sheet(summary).rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table without lines."""
        widths = [max(len(row[place]) for row in self._rows) for place in range(3)]
        block_width = sum(widths) + 2
        blocks = max(1, min(3, (options.max_width + _GAP) // (block_width + _GAP)))
        height = -(-len(self._rows) // blocks)
        table = Table.grid()
        for block in range(blocks):
            last = _GAP if block < blocks - 1 else 0
            table.add_column(width=widths[0] + 1, no_wrap=True)
            table.add_column(width=widths[1], no_wrap=True, justify="right")
            table.add_column(width=1)
            table.add_column(width=widths[2] + last, no_wrap=True)
        for line in range(height):
            cells: list[str] = []
            for name, value, unit in self._rows[line::height]:
                cells += [name, value, "", unit]
            table.add_row(*map(Text, cells))
        yield table
        yield ""
