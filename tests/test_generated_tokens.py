"""Only tokens that the policy generated are trained, measured and counted, whatever stands at the others."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine, random_words
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.critic import Critic
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.objectives import Mismatch, PolicyGradient

LIMITS = {"tasks_per_collection": 3, "group_size": 4, "max_turns": 4, "max_tokens": 4, "context_limit": 128}


class Recorder(L.Callback):
    """Gradients of each update, and the figures of the last."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.figures: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in pl_module.parameters()]))

    def on_train_epoch_end(self, trainer, pl_module):
        timed = ("throughput/", "rollout/seconds")
        figures = trainer.callback_metrics.items()
        self.figures = {name: float(value) for name, value in figures if not name.startswith(timed)}


def train(fit, objective, script=None, critic=None, callbacks=(), precision="64-true", optimizer=None, **settings):
    recorder = Recorder()
    data = RolloutDataModule(Countdown(), ScriptedEngine(script), **{**LIMITS, **settings})
    module = agent(objective=objective, critic=critic, **({"optimizer": optimizer} if optimizer else {}))
    fit(module, data, precision=precision, callbacks=[*callbacks, recorder])
    return recorder, module


def polluted(dirt: float) -> type[PolicyGradient]:
    """A policy gradient whose inputs are off by ``dirt`` at every token that was not generated."""

    def dirty(batch):
        def at(values):
            return None if values is None else values + torch.where(batch.generated, 0.0, dirt)

        names = ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "advantages", "rewards", "values")
        return batch.replace(**{name: at(getattr(batch, name)) for name in names}), at

    class Polluted(PolicyGradient):
        def token_rewards(self, rows):
            return super().token_rewards(dirty(rows)[0])

        def terms(self, batch, logprobs, entropy, weights):
            batch, at = dirty(batch)
            return super().terms(batch, at(logprobs), at(entropy), weights)

    return Polluted


@pytest.mark.parametrize("dirt", [100.0, math.nan, -math.inf])
@pytest.mark.parametrize(
    ("settings", "critic"),
    [
        ({"ratio": "turn", "kl_coefficient": 0.1, "entropy_coefficient": 0.01}, None),
        ({"ratio": "sequence", "kl_coefficient": 0.1, "kl_estimator": "k3", "kl_on": "signal"}, None),
        ({"ratio": "token", "old": "recompute", "mismatch": Mismatch(level="turn"), "dual_clip": 3.0}, None),
        ({"advantage": "gae", "advantage_pooling": "turn", "kl_in": "reward", "kl_coefficient": 0.1}, Critic()),
    ],
    ids=["SO-GRPO", "GSPO", "mismatch", "SO-PPO"],
)
def test_what_stands_at_observations_changes_no_figure_and_no_gradient(fit, settings, critic, dirt) -> None:
    def run(kind):
        switch = ClippingTriggeredNormalization(rule="plus1")
        return train(fit, kind(**settings), critic=critic, callbacks=[switch], passes=2)[0]

    clean, dirty = run(PolicyGradient), run(polluted(dirt))
    assert clean.gradients[0].norm() > 1e-3
    for ours, theirs in zip(clean.gradients, dirty.gradients, strict=True):
        assert torch.equal(ours, theirs)
    assert clean.figures["train/clip_fraction"] > 0
    assert clean.figures == dirty.figures


def silent(request):
    return [], []


@pytest.mark.parametrize("ratio", ["token", "turn", "sequence"])
def test_without_a_generated_token_loss_gradient_and_kl_are_exactly_zero(fit, ratio) -> None:
    objective = PolicyGradient(ratio=ratio, kl_coefficient=0.1, entropy_coefficient=0.01)
    switch = ClippingTriggeredNormalization(rule="literal")
    recorder, module = train(
        fit, objective, silent, callbacks=[switch], optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    )
    (gradient,), figures = recorder.gradients, recorder.figures
    assert not gradient.any()
    for name in ("train/loss", "train/policy_loss", "train/reference_kl", "train/clip_fraction"):
        assert figures[name] == 0.0
    assert figures["normalization/factor"] == 1.0
    assert not module.trainer.optimizers[0].state  # it has never stepped


@pytest.mark.parametrize("aggregation", ["trajectory", "token", "turn"])
@pytest.mark.parametrize("ratio", ["token", "turn", "sequence"])
def test_a_silent_trajectory_beside_others_changes_nothing_for_them(fit, ratio, aggregation) -> None:
    def second_task_is_silent(request):
        return silent(request) if request.trajectory.task == 1 else random_words(request)

    objective = PolicyGradient(ratio=ratio, advantage="reward", kl_coefficient=0.1, entropy_coefficient=0.01)
    settings = {"aggregation": aggregation, "group_size": 2}
    alone, _ = train(fit, objective, tasks_per_collection=1, **settings)
    both, _ = train(fit, objective, second_task_is_silent, tasks_per_collection=2, **settings)
    assert alone.gradients[0].norm() > 1e-3
    torch.testing.assert_close(both.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-9)  # Llama's norms are float32
    for name in ("loss", "reference_kl", "entropy", "clip_fraction", "ratio"):
        assert both.figures[f"train/{name}"] == pytest.approx(alone.figures[f"train/{name}"], rel=1e-6)


class Half(PolicyGradient):
    """Ratios of 1.5 everywhere; advantage 1 in the first half of the trajectories, -1 in the others."""

    def terms(self, batch, logprobs, entropy, weights):
        signs = torch.where(batch.trajectory < 6, 1.0, -1.0).to(logprobs.dtype)
        batch = batch.replace(behaviour_logprobs=logprobs.detach() - math.log(1.5), advantages=signs)
        terms, metrics = super().terms(batch, logprobs, entropy, weights)
        terms_of_losers, _ = super().terms(batch.replace(advantages=signs.clamp(max=0)), logprobs, entropy, weights)
        losers = bool((batch.advantages[batch.generated] < 0).any())
        self.expected.append(float(((batch.trajectory < 6) & batch.generated).sum() / batch.generated.sum()))
        return dataclasses.replace(terms, policy=terms_of_losers.policy) if self.only and losers else terms, metrics

    expected: ClassVar[list[float]] = []
    only = False


@pytest.mark.parametrize("ratio", ["token", "turn", "sequence"])
def test_only_the_side_that_the_clip_bounds_counts_as_clipped(fit, ratio) -> None:
    """Ratio 1.5, range 0.2: A = 1 gives loss -1.2 and no gradient, A = -1 gives 1.5 and its gradient."""
    halves = type("Halves", (Half,), {"expected": []})
    losers = type("Losers", (Half,), {"expected": [], "only": True})
    recorder, _ = train(fit, halves(ratio=ratio))
    others, _ = train(fit, losers(ratio=ratio))
    figures = recorder.figures
    assert figures["train/clip_fraction"] == pytest.approx(halves.expected[0], rel=1e-6)
    assert figures["train/policy_loss"] == pytest.approx((-1.2 + 1.5) / 2, rel=1e-6)
    torch.testing.assert_close(recorder.gradients[0], others.gradients[0], rtol=0, atol=1e-12)


def test_ratios_are_to_the_engines_logprobs_only_where_it_is_said_so(fit) -> None:
    """The scripted engine makes its log-probabilities up."""
    bypass, _ = train(fit, PolicyGradient(ratio="token"))
    proximal, _ = train(fit, PolicyGradient(ratio="token", old="recompute"))
    assert abs(bypass.figures["train/ratio"] - 1) > 0.1
    assert "train/mismatch_kl" not in bypass.figures
    assert proximal.figures["train/ratio"] == 1.0
    assert proximal.figures["train/ratio_max"] == 1.0
    assert proximal.figures["train/mismatch_kl"] > 0.1
    assert proximal.figures["train/mismatch_kl_max"] >= proximal.figures["train/mismatch_kl"]


def constant_reward(trajectory):
    return 0.5 if trajectory.group == 0 else float(trajectory.sibling)


@pytest.mark.parametrize("kl_estimator", ["k2", "k3"])
def test_the_kl_at_groups_without_signal_is_an_option(fit, kl_estimator) -> None:
    class Kept(PolicyGradient):
        """The gradient of the KL term alone; a reference that is off by 0.1 everywhere."""

        def terms(self, batch, logprobs, entropy, weights):
            batch = batch.replace(reference_logprobs=batch.reference_logprobs - 0.1)
            terms, metrics = super().terms(batch, logprobs, entropy, weights * (batch.trajectory < self.most))
            return dataclasses.replace(terms, policy=0 * terms.policy, clip_bias=None), metrics

        most = 99

    class Dead(Kept):
        most = 4  # the first group's

    def gradient(kind, kl_on):
        objective = kind(kl_coefficient=1.0, kl_estimator=kl_estimator, kl_on=kl_on)
        return train(fit, objective, reward=constant_reward)[0].gradients[0]

    everything, signal, dead = gradient(Kept, "all"), gradient(Kept, "signal"), gradient(Dead, "all")
    assert dead.norm() > 1e-3
    assert not gradient(Dead, "signal").any()
    torch.testing.assert_close(everything, signal + dead, rtol=1e-6, atol=1e-8)
