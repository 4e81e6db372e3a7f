"""The front page of the command, and what the listing commands share."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the last column takes what room there is."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def summary(thing: object) -> str:
    """The first sentence of its docstring."""
    text = " ".join((thing.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


LIGHTNING = {
    "fit": "Train: roll out, update, validate; figures in TensorBoard.",
    "validate": "Roll out the validation tasks with a checkpoint, an expert, or chance.",
    "test": "The same with the test tasks.",
}
EXAMPLES = """  sorl demo
  sorl fit --config sorl:quickstart --config sorl:clipping_triggered_normalization
  sorl test --config sorl:quickstart --ckpt_path runs/.../last.ckpt"""


def front_page(commands: Iterable[str]) -> None:
    """Print what ``sorl`` can do: LightningCLI's subcommands, and ``commands``, a line each."""
    print("usage: sorl COMMAND ...        sorl COMMAND --help says more; --debug shows where an error came from\n")
    for name, line in LIGHTNING.items():
        print(f"  {name:<12}{line}")
    print()
    for name in commands:
        module = importlib.import_module(f"sorl_lightning.commands.{name}")
        line = summary(module).partition(": ")[2]
        print(f"  {name:<12}{line[:1].upper()}{line[1:]}")
    print(f"\nexamples:\n{EXAMPLES}")
