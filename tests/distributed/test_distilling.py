"""Distillation on two ranks is distillation on one, the teacher sharded as well."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import scenarios
from processes import launch
from test_sharding import FIVE, agree

from sorl_lightning.callbacks import GuidedOPD, KLScheduleTransition
from sorl_lightning.objectives import Distillation

pytestmark = pytest.mark.distributed
TEACHER = dataclasses.replace(scenarios.LLAMA, seed=3)


def settings(divergence: str = "reverse_kl", switch: Any = None, **more: Any) -> dict[str, Any]:
    """What a fit needs; objects that a fit changes are made anew for each."""
    return {
        **FIVE,
        "objective": Distillation(divergence=divergence),  # type: ignore[arg-type]
        "module_settings": {"teacher": scenarios.ShardedTeacher(TEACHER)},
        "callbacks": [] if switch is None else [switch()],
        **more,
    }


def hard() -> KLScheduleTransition:
    return KLScheduleTransition("hard")


def few_trajectories(switch: Any) -> dict[str, Any]:
    """Lengths that differ, on ranks that hold different ones: turns 2 and 3 count on neither rank alone."""
    return settings(switch=switch, micro_batches=3, tasks_per_collection=4, group_size=3)


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@pytest.mark.parametrize("switch", [None, hard, KLScheduleTransition], ids=["vanilla", "turns", "blend"])
def test_full_vocabulary_and_turn_weights(strategy, switch) -> None:
    one = scenarios.run("auto", 1, few_trajectories(switch))
    agree(one, launch(scenarios.run, 2, strategy, 2, few_trajectories(switch)))


@pytest.mark.parametrize("divergence", ["topk_reverse_kl_tail", "k1"])
def test_recorded_scores(divergence) -> None:
    one = scenarios.run("auto", 1, settings(divergence))
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, settings(divergence)))


def test_turn_weights_are_no_trajectory_weights() -> None:
    vanilla, turns = (scenarios.run("auto", 1, few_trajectories(switch)) for switch in (None, hard))
    assert abs(vanilla["gradients"][0] - turns["gradients"][0]).max() > 1e-3


def test_a_sharded_teacher_plays_turns() -> None:
    one = scenarios.run("auto", 1, settings(switch=GuidedOPD))
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, settings(switch=GuidedOPD)))


@pytest.mark.parametrize("divergence", ["reverse_kl", "topk_reverse_kl_tail"])
def test_a_sharded_teacher_runs_as_often_on_every_rank(divergence) -> None:
    one = scenarios.run("auto", 1, settings(divergence, micro_batches=2))
    shares = launch(scenarios.in_small_chunks, 2, "fsdp2", 2, settings(divergence, micro_batches=2))
    agree(one, shares)
    assert [share["share"] for share in shares] == [0.5, 0.5]


@pytest.mark.parametrize("divergence", ["reverse_kl", "topk_reverse_kl_tail"])
def test_held_out_figures_are_those_of_one_process(divergence) -> None:
    """Three held-out tasks: one rank has two of them, and runs more often where rows go one at a time."""
    validation = settings(divergence, passes=1, trainer_settings={"limit_val_batches": 1})
    one = scenarios.run("auto", 1, validation)["figures"][-1]["val/divergence"]
    for share in launch(scenarios.row_by_row, 2, "fsdp2", 2, validation):
        assert share["figures"][-1]["val/divergence"] == pytest.approx(one, rel=2e-7)
