"""``sorl envs``: list the environments."""

from __future__ import annotations

import re

from sorl_lightning.commands.listing import show, summary
from sorl_lightning.rollout import environments as worlds
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.shipped import shipped

EXTRA = re.compile(r"sorl-lightning\[([\w,]+)\]")


def envs() -> None:
    """List the environments, the extra that each needs, and the configs that play it."""
    configs = {name: path.read_text() for name, path in shipped("configs").items()}
    rows = []
    for name in worlds.__all__:
        world = getattr(worlds, name)
        if isinstance(world, type) and issubclass(world, Environment):
            extra = EXTRA.search(world.__doc__ or "")
            users = [config for config, text in configs.items() if re.search(rf"\.{name}\b", text)]
            rows.append((name, extra[1] if extra else "", summary(world), ", ".join(users)))
    show(f"--data.environment {worlds.__name__}.NAME", ("NAME", "extra", "", "configs (sorl:...)"), rows)
