"""It sees what the normalization would, and the run does not notice."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingMonitor, ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.functional.collapse import has_collapsed, is_collapsing


class Figures(L.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run(fit, *callbacks, environment=None, epochs=1):
    data = RolloutDataModule(
        environment or Countdown(), ScriptedEngine(), tasks_per_collection=3, group_size=4, max_turns=4, max_tokens=4,
        context_limit=128, passes=2, micro_batches=2,
    )  # fmt: skip
    figures = Figures()
    module = fit(agent(), data, callbacks=[*callbacks, figures], max_epochs=epochs)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), figures.seen


def test_it_logs_what_the_normalization_sees_and_changes_nothing(fit) -> None:
    plain, _ = run(fit)
    watched, figures = run(fit, ClippingMonitor(rule="max1"))
    assert torch.equal(plain, watched)
    switch = ClippingTriggeredNormalization(rule="max1")
    _, others = run(fit, switch)
    assert figures[0]["clipping/triggered"] == others[0]["normalization/triggered"] == 1.0
    assert {"clipping/policy_norm", "clipping/bias_norm", "clipping/factor"} <= set(figures[0])


def test_beside_the_normalization_it_leaves_the_norms_to_it(fit) -> None:
    alone, _ = run(fit, ClippingTriggeredNormalization(rule="max1"))
    both, figures = run(fit, ClippingMonitor(), ClippingTriggeredNormalization(rule="max1"))
    assert torch.equal(alone, both)
    assert not [name for name in figures[0] if name.startswith("clipping/")]
    assert "turns/ratio/0" in figures[0]


def test_figures_by_turn_are_means_over_the_tokens_of_the_turn(fit) -> None:
    _, (figures,) = run(fit, ClippingMonitor(turns=2), environment=Countdown([1, 2, 3]))
    turns = {name for name in figures if name.startswith("turns/")}
    names = ("ratio", "clip_fraction", "entropy", "kl", "advantage_variance")
    assert turns == {f"turns/{name}/{index}" for name in names for index in (0, 1)}
    assert 0 < figures["turns/clip_fraction/0"] < 1
    assert figures["turns/advantage_variance/0"] > 0


def test_it_says_in_words_that_a_run_is_collapsing() -> None:
    monitor = ClippingMonitor(patience=2)
    monitor.success, monitor.clip_fraction = [0.6, 0.6, 0.2, 0.1], [0.1, 0.1, 0.3, 0.4]
    assert is_collapsing(monitor.success, monitor.clip_fraction, 2)
    sentence = monitor._sentence(3)
    assert "success fell from 0.60 at best to 0.15 while 35% of the tokens are clipped" in sentence


def test_its_memory_survives_a_round_trip() -> None:
    monitor, other = ClippingMonitor(), ClippingMonitor()
    monitor.success, monitor.clip_fraction, monitor.updates = [0.5], [0.1], 3
    other.load_state_dict(monitor.state_dict())
    assert other.state_dict() == monitor.state_dict()


@pytest.mark.parametrize(
    ("success", "clipped", "collapsing"),
    [
        ([0.6, 0.6, 0.2, 0.1], [0.1, 0.1, 0.3, 0.4], True),
        ([0.6, 0.6, 0.2, 0.1], [0.4, 0.4, 0.1, 0.1], False),  # less is clipped than at the best
        ([0.6, 0.6, 0.4, 0.4], [0.1, 0.1, 0.3, 0.4], False),  # more than half is left
        ([0.6, 0.1, 0.1], [0.1, 0.9, 0.9], False),  # too short
    ],
)
def test_when_a_run_is_collapsing(success, clipped, collapsing) -> None:
    assert is_collapsing(success, clipped, window=2) is collapsing


def test_a_collapse_lasts_for_the_last_fifth() -> None:
    assert has_collapsed([0.6] * 8 + [0.2, 0.1])
    assert not has_collapsed([0.6] * 8 + [0.2, 0.4])
    assert not has_collapsed([])
    assert not has_collapsed([0.0] * 10)
