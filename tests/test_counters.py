"""What Lightning counts, and what this project counts beside it."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import RolloutError
from test_step_guard import broken


def rollouts(environment=None, **settings) -> RolloutDataModule:
    limits = {"tasks_per_collection": 2, "group_size": 2, "max_turns": 2, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(environment or Countdown(), ScriptedEngine(), **{**limits, **settings})


class Collections(L.Callback):
    """Index of each collection that was begun."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 0:
            self.seen.append(trainer.datamodule.collection.index)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("max_steps", "collections"), [(4, [0]), (6, [0, 1]), (8, [0, 1])])
def test_max_steps_counts_updates_whatever_the_collections(fit, max_steps, collections, micro_batches) -> None:
    """An endless number of epochs ends at the step asked for, in the middle of a collection too."""
    watch = Collections()
    module = fit(
        agent(), rollouts(mini_batches=2, passes=2, micro_batches=micro_batches), max_epochs=-1, max_steps=max_steps,
        callbacks=[watch],
    )  # fmt: skip
    assert module.trainer.global_step == module.policy_version == max_steps
    assert watch.seen == collections


def test_an_endless_run_ends_when_no_group_can_come(fit) -> None:
    def fails(task, attempt, text=None):
        if attempt > 4:
            raise OSError("the world ended")

    module = agent()
    with pytest.raises(RolloutError, match="all 2 groups of collection"):
        fit(module, rollouts(Countdown([1, 1], fails)), max_epochs=-1, max_steps=1000)
    assert 0 < module.policy_version < 10


def test_a_skipped_step_counts_as_a_step_and_not_as_a_version(fit) -> None:
    module = fit(agent(objective=broken([1, 2])), rollouts(passes=4))
    assert module.trainer.global_step == 4
    assert module.policy_version == 2
    assert module.steps.skipped == 2


def test_figures_carry_the_counters_that_lightnings_axis_does_not(fit, tmp_path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="run", default_hp_metric=False)
    fit(agent(), rollouts(mini_batches=2, micro_batches=2), max_epochs=3, logger=logger, log_every_n_steps=1)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    versions = [(event.step, event.value) for event in events.Scalars("policy_version")]
    assert versions == [(step, step + 1) for step in range(6)]  # a step is an update, whatever its micro-batches
    assert [event.step for event in events.Scalars("rollout/success")] == [0, 2, 4]
    assert [event.value for event in events.Scalars("train/staleness")] == [0, 1] * 3


def test_clipping_bounds_the_norm_that_is_logged(fit) -> None:
    class Norms(L.Callback):
        figures: dict[str, float]

        def on_train_epoch_end(self, trainer, pl_module) -> None:
            self.figures = {name: float(value) for name, value in trainer.callback_metrics.items()}

    norms, before = Norms(), {}
    module = agent(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))

    class Start(L.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            before.update({name: value.clone() for name, value in pl_module.state_dict().items()})

    fit(module, rollouts(), gradient_clip_val=1e-3, callbacks=[norms, Start()])
    assert norms.figures["train/grad_norm"] > 1e-3
    assert norms.figures["train/grad_norm_clipped"] == pytest.approx(1e-3, rel=1e-4)
    names = [name for name, _ in module.named_parameters()]  # tied ones once
    moved = math.sqrt(sum(float((module.state_dict()[name] - before[name]).square().sum()) for name in names))
    assert moved == pytest.approx(1e-3, rel=1e-2)
