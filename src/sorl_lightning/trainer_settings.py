"""What the command adds to Lightning's trainer, and which of its settings it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO

from sorl_lightning.checkpoints import AtomicCheckpointIO
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.strategies import FSDP1, FSDP2

Rule = tuple[Callable[[Any], bool], str]
COUNT: Rule = (lambda value: value >= 1, "at least 1")
COUNT_OR_ENDLESS: Rule = (lambda value: value >= 1 or value == -1, "at least 1, or -1 for no end")
SHARE_OR_COUNT: Rule = (lambda value: 0 <= value < math.inf, "a share of 1 or a number of batches, 0 or more")
RULES: dict[str, Rule] = {
    "max_epochs": COUNT_OR_ENDLESS,
    "max_steps": COUNT_OR_ENDLESS,
    "min_epochs": COUNT,
    "min_steps": COUNT,
    "num_nodes": COUNT,
    "check_val_every_n_epoch": COUNT,
    "log_every_n_steps": COUNT,
    "gradient_clip_val": (lambda value: 0 < value < math.inf, "above 0 and finite, or null for none"),
    "gradient_clip_algorithm": (lambda value: value in ("norm", "value"), "norm or value"),
    "accelerator": (
        lambda value: not isinstance(value, str) or value in ("auto", "cpu", "gpu", "cuda", "mps"),
        "auto, cpu, gpu, cuda or mps",
    ),
    "devices": (lambda value: _are_devices(value), "a number of at least 1, -1 or auto for all, or a list of devices"),
    "limit_train_batches": (
        lambda value: isinstance(value, float) and value == 1.0,
        "left out: a collection is trained whole",
    ),
    "limit_val_batches": SHARE_OR_COUNT,
    "limit_test_batches": SHARE_OR_COUNT,
    "overfit_batches": (lambda value: value == 0, "left out: rollouts differ from collection to collection"),
    "fast_dev_run": (lambda value: not value, "left out: it cuts a collection short; take max_epochs 1"),
    "reload_dataloaders_every_n_epochs": (lambda value: value == 0, "left out: the stream is one for the whole run"),
    "val_check_interval": (lambda value: value == 1.0, "left out: use check_val_every_n_epoch"),
    "max_time": (
        lambda value: not isinstance(value, str) or re.fullmatch(r"\d+:\d+:\d+:\d+", value) is not None,
        "days, hours, minutes and seconds as DD:HH:MM:SS",
    ),
    "num_sanity_val_steps": (lambda value: value >= -1, "0 or more, or -1 for all"),
}


COUNTERS = ("collection", "policy_version", "epoch", "step")
VALIDATION = (
    "success", "return", "turns", "tokens", "ending", "environment", "seconds", "failed_groups", "episodes",
    "divergence", "nll",
)  # fmt: skip


def check_trainer(trainer: Any) -> None:
    """Refuse settings of Lightning's trainer that cannot work.

    Raises:
        ConfigurationError: names the first.
    """
    for name, (holds, allowed) in RULES.items():
        value = trainer.get(name)
        if value is not None and not holds(value):
            raise ConfigurationError(f"trainer.{name} must be {allowed}, got {value!r}")
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and strategy.startswith("fsdp"):
        raise ConfigurationError(FSDP1)


def check_monitor(name: str, monitor: str | None) -> None:
    """Refuse a checkpoint's figure that no run has; those of callbacks are named FAMILY/FIGURE too.

    Raises:
        ConfigurationError: names the setting.
    """
    if monitor is None or monitor in COUNTERS:
        return
    family, _, figure = monitor.partition("/")
    if not figure or (family == "val" and figure.partition("/")[0] not in VALIDATION):
        raise ConfigurationError(
            f"{name} must be {', '.join(COUNTERS)} or a figure as val/success (val/ has {', '.join(VALIDATION)}), "
            f"got {monitor!r}"
        )


def _are_devices(value: Any) -> bool:
    if isinstance(value, str) and value != "auto":
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not all(part.lstrip("-").isdigit() for part in parts):
            return False
        numbers = [int(part) for part in parts]
        return _are_devices(numbers if "," in value else int(value))
    if isinstance(value, list):
        return bool(value) and all(isinstance(index, int) and index >= 0 for index in value)
    return value in ("auto", -1) or value >= 1


def chosen_strategy(trainer: Any) -> dict[str, Any]:
    """FSDP2 where there are several devices and no strategy is asked for."""
    if trainer.strategy != "auto" or (trainer.devices in (1, "1") and trainer.num_nodes == 1):
        return {}
    place = {name: trainer[name] for name in ("accelerator", "devices", "num_nodes")}
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return {"strategy": FSDP2()} if L.Trainer(**place, **silent).world_size > 1 else {}


def atomic_checkpoints(trainer: Any) -> dict[str, Any]:
    """The plugins asked for, and checkpoints that are whole or not there where no other plugin writes them."""
    asked = trainer.plugins or []
    plugins = list(asked) if isinstance(asked, (list, tuple)) else [asked]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return {"plugins": plugins}
