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
from sorl_lightning.critic import Critic
from sorl_lightning.models import Pretrained
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
        np.testing.assert_allclose(share["norms"], one["norms"], rtol=1e-9)
        np.testing.assert_allclose(share["switch"], one["switch"], rtol=1e-9)
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


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("objective", "norm"),
    [
        (PolicyGradient(ratio="token"), "exact"),
        (PolicyGradient(ratio="turn", kl_coefficient=0.1, entropy_coefficient=0.01), "exact"),
        (PolicyGradient(ratio="turn", old="recompute", advantage="reinforce++"), "surrogate"),
    ],
    ids=["pure policy", "with regularizers", "surrogate, recomputed"],
)
def test_normalization_has_one_bias_and_one_factor(objective, norm, micro_batches) -> None:
    settings = {
        **FIVE,
        "objective": objective,
        "micro_batches": micro_batches,
        "switch": {"rule": "plus1", "norm": norm},
    }
    one = scenarios.run("auto", 1, settings)
    assert any(figures["normalization/bias_norm"] > 1e-2 for figures in one["figures"])
    assert len({figures["normalization/factor"] for figures in one["figures"]}) > 1
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, settings))


@pytest.mark.parametrize("switch", [None, {"rule": "plus1"}], ids=["Turn-PPO", "SO-PPO"])
@pytest.mark.parametrize("backbone", ["own", "policy"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_critic_trains_as_on_one_process(micro_batches, backbone, switch) -> None:
    settings = {
        **FIVE,
        "objective": PolicyGradient(advantage="gae", kl_coefficient=0.1, kl_in="reward"),
        "module_settings": {"critic": Critic(backbone=backbone, lam=0.9)},
        "micro_batches": micro_batches,
        "switch": switch,
    }
    one = scenarios.run("auto", 1, settings)
    if switch is not None:
        assert any(factor < 0.9 for _, _, factor in one["switch"])
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


@pytest.mark.parametrize("aggregation", ["trajectory", "token", "turn", "fixed"])
def test_weights_are_those_of_the_whole_batch(aggregation) -> None:
    settings = {**FIVE, "aggregation": aggregation, "micro_batches": 3, "group_size": 3}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "fsdp2", 2, settings))


@pytest.mark.parametrize("plan", [{"activation_checkpointing": True}, {"cpu_offload": True}], ids=str)
def test_plans_change_memory_and_not_numbers(plan) -> None:
    settings = {**FIVE, "objective": PolicyGradient(entropy_coefficient=0.01), "switch": {"rule": "plus1"}}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "fsdp2", 2, {**settings, "plan": plan}))


def test_adapters_alone_are_trained_and_normalized(tmp_path) -> None:
    pytest.importorskip("peft")
    model, tokenizer = scenarios.LLAMA.load()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    source = scenarios.DoubleLoRA(base=Pretrained(path=str(tmp_path)), rank=4)
    settings = {**FIVE, "source": source, "switch": {"rule": "plus1"}, "micro_batches": 2}
    one = scenarios.run("auto", 1, settings)
    assert any(factor < 1 for _, _, factor in one["switch"])
    agree(one, launch(scenarios.run, 2, "fsdp2", 2, settings))


def test_an_untied_head() -> None:
    settings = {**FIVE, "source": dataclasses.replace(scenarios.LLAMA, tied=False)}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "fsdp2", 2, settings))


def test_ddp_trains_as_one_does() -> None:
    settings = {**FIVE, "micro_batches": 2}
    agree(scenarios.run("auto", 1, settings), launch(scenarios.run, 2, "ddp", 2, settings))


PPO = {"objective": PolicyGradient(advantage="gae"), "module_settings": {"critic": Critic(backbone="policy")}}


@pytest.mark.parametrize("algorithm", [{}, PPO], ids=["SO-GRPO", "SO-PPO"])
def test_a_rank_without_a_token_to_train_does_not_hang(algorithm) -> None:
    settings = {**FIVE, "tasks_per_collection": 2, "micro_batches": 9, "group_size": 4, "switch": {"rule": "plus1"}}
    settings |= algorithm
    one = scenarios.run("auto", 1, settings)
    shares = launch(scenarios.run, 2, "fsdp2", 2, settings)
    assert all(0 in share["tokens"] for share in shares)
    assert shares[0]["tokens"] != shares[1]["tokens"]
    agree(one, shares)
