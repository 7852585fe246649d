"""Tables on a terminal: as wide as it is; names are folded where they must be, numbers never."""

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 160
"""Whoever reads a pipe looks for whole names."""


def open_console() -> Console:
    """Returns stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def make_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    num_names: int = 1,
    styles: Sequence[str | None] = (),
    sections: Sequence[int] = (),
) -> Table:
    """Lays out cells.

    Args:
        headers: of the columns.
        rows: cells, as many a row as there are headers.
        title: above the table.
        num_names: columns at the left that hold names; all others are numbers.
        styles: of the rows, as rich knows them; missing ones are plain.
        sections: rows that a line stands under.
    """
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for place, header in enumerate(headers):
        if place < num_names:
            table.add_column(header, overflow="fold")
        else:
            parts = [*header.split(), *(row[place] for row in rows)]
            table.add_column(header, justify="right", width=max(map(len, parts)))
    for number, row in enumerate(rows):
        style = styles[number] if number < len(styles) else None
        table.add_row(*row, style=style, end_section=number in sections)
    return table
