"""``sorl callbacks``: list the switches that runs are ablated by."""

from __future__ import annotations

import re

from sorl_lightning import callbacks as package
from sorl_lightning.commands.listing import show, summary
from sorl_lightning.shipped import shipped

CALLBACK = re.compile(r"class_path: sorl_lightning\.callbacks\.(\w+)")


def callbacks() -> None:
    """List the switches, each a component that a run is ablated by: a callback of the same name."""
    rows = []
    for name, path in shipped("callbacks").items():
        found = CALLBACK.search(path.read_text())
        assert found is not None, path
        rows.append((name, summary(getattr(package, found[1]))))
    show("sorl fit --config CONFIG --config sorl:NAME", ("NAME", ""), rows)
