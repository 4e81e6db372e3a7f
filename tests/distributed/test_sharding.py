"""One process and two: the same gradients, norms, factors, parameters and figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import scenarios
from processes import launch

from doubles import ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.objectives import PolicyGradient

pytestmark = pytest.mark.distributed
FIVE = {"passes": 5}


def agree(one: dict[str, Any], several: list[dict[str, Any]], moved: float = 1e-3) -> None:
    """Gradients, norms and figures to 1e-9, parameters to 1e-8, after steps that each moved them."""
    assert sorted(task for share in several for task in share["tasks"]) == sorted(one["tasks"])
    assert len(one["parameters"]) == 5
    steps = np.diff(np.stack(one["parameters"]), axis=0)
    assert (np.abs(steps).max(axis=1) > moved).all()
    for share in several:
        for ours, theirs in zip(one["gradients"], share["gradients"], strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-9, atol=1e-9 * np.abs(ours).max())
        np.testing.assert_allclose(np.stack(share["parameters"]), np.stack(one["parameters"]), rtol=0, atol=1e-8)
        for ours, theirs in zip(one["figures"], share["figures"], strict=True):
            assert set(ours) == set(theirs)
            for name, value in ours.items():
                if name.startswith(("train/", "normalization/")):
                    assert theirs[name] == pytest.approx(value, rel=2e-7, abs=1e-7), name  # logged in float32


OBJECTIVES = {
    "grpo": PolicyGradient(ratio="turn"),
    "reference and entropy": PolicyGradient(ratio="token", kl_coefficient=0.1, entropy_coefficient=0.01),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_two_sharded_processes_train_as_one_does(objective) -> None:
    settings = {**FIVE, "objective": objective}
    one = scenarios.run("auto", 1, settings)
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, settings))


@pytest.mark.parametrize("rule", ["literal", "relative"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_normalization_agrees(rule, micro_batches) -> None:
    objective = PolicyGradient(ratio="turn", kl_coefficient=0.1)
    settings = {**FIVE, "objective": objective, "micro_batches": micro_batches}
    one = scenarios.run("auto", 1, {**settings, "callbacks": [ClippingTriggeredNormalization(rule=rule)]})
    if rule == "literal":
        assert any(figures["normalization/factor"] != 1 for figures in one["figures"])
    several = {**settings, "callbacks": [ClippingTriggeredNormalization(rule=rule)]}
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, several))


def test_a_clipped_token_on_one_rank_alone_does_not_hang() -> None:
    settings = {**FIVE, "engine": ScriptedEngine(scenarios.one_odd_trajectory), "micro_batches": 4}
    one = scenarios.run("auto", 1, {**settings, "callbacks": [ClippingTriggeredNormalization(rule="literal")]})
    assert one["figures"][0]["normalization/bias_norm"] > 0
    several = {**settings, "callbacks": [ClippingTriggeredNormalization(rule="literal")]}
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, several))


@pytest.mark.parametrize("aggregation", ["trajectory", "token", "turn"])
def test_weights_are_those_of_the_whole_batch(aggregation) -> None:
    settings = {**FIVE, "aggregation": aggregation, "micro_batches": 3, "group_size": 3}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "fsdp2", 2, settings))


@pytest.mark.parametrize("plan", [{"activation_checkpointing": True}, {"cpu_offload": True}], ids=str)
def test_plans_change_memory_and_not_numbers(plan) -> None:
    settings = {**FIVE, "plan": plan}
    agree(scenarios.run("auto", 1, FIVE), launch(scenarios.run, 2, "fsdp2", 2, settings))


def test_an_untied_head() -> None:
    settings = {**FIVE, "source": dataclasses.replace(scenarios.LLAMA, tied=False)}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "fsdp2", 2, settings))


def test_ddp_trains_as_one_does() -> None:
    settings = {**FIVE, "micro_batches": 2}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "ddp", 2, settings))


def test_a_rank_without_a_token_to_train_does_not_hang() -> None:
    settings = {**FIVE, "tasks_per_collection": 2, "micro_batches": 9, "group_size": 4}
    one = scenarios.run("auto", 1, settings)
    shares = launch(scenarios.run, 2, "fsdp2", 2, settings)
    assert all(0 in share["tokens"] for share in shares)
    agree(one, shares)
