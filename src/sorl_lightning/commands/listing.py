"""What the listing commands share: a table, and the first sentence of a docstring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Its first column is whole, to be copied, however narrow the terminal; others break at words."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)  # square brackets are those of extras


def summary(thing: object) -> str:
    """The first sentence of its docstring."""
    text = " ".join((thing.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]
