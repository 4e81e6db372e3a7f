"""``sorl configs``: list the configs that ship with the package."""

from __future__ import annotations

from pathlib import Path

from sorl_lightning.commands.listing import show
from sorl_lightning.shipped import shipped


def configs() -> None:
    """List the configs, each a run or, in a folder, a part of one that comes after a run's config."""
    show(
        "sorl fit --config sorl:NAME",
        ("NAME", ""),
        ((name, comment(path)) for name, path in shipped("configs").items()),
    )


def comment(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).split(". ")[0].rstrip(".") + "."
