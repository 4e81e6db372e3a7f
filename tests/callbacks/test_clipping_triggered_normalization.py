"""The factor acts on the policy's gradient alone, and only when something was clipped."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.objectives import PolicyGradient


class Gradients(L.Callback):
    """Keeps the gradient as the optimiser would see it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.figures: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(torch.cat([p.grad.flatten().clone() for p in pl_module.parameters()]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run(fit, callbacks=(), objective=None, engine=None, micro_batches=1, epochs=1, updates=1, environment=None):
    recorder = Gradients()
    data = RolloutDataModule(
        environment or Countdown(), engine, tasks_per_collection=3, group_size=4, max_turns=4, max_tokens=4,
        context_limit=128, micro_batches=micro_batches, passes=updates,
    )  # fmt: skip
    module = agent(objective=objective or PolicyGradient())
    settings = {"max_epochs": epochs, "precision": "64-true", "callbacks": [*callbacks, recorder]}
    fit(module, data, **settings)
    return recorder, module


def clip_bias_gradient(fit, objective=None) -> torch.Tensor:
    """C by itself: the gradient of a fit whose only loss is the clip bias."""

    class OnlyBias(PolicyGradient):
        def terms(self, batch, logprobs, entropy, weights):
            terms, metrics = super().terms(batch, logprobs, entropy, weights)
            import dataclasses

            return dataclasses.replace(terms, policy=terms.clip_bias, regularizer=None, clip_bias=None), metrics

    recorder, _ = run(fit, objective=OnlyBias(), engine=ScriptedEngine())
    return recorder.seen[0]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_max1_divides_the_gradient_by_the_norm_of_the_bias(fit, micro_batches) -> None:
    plain, _ = run(fit, engine=ScriptedEngine(), micro_batches=micro_batches)
    switch = ClippingTriggeredNormalization(rule="max1")
    normalized, _ = run(fit, [switch], engine=ScriptedEngine(), micro_batches=micro_batches)
    norm = clip_bias_gradient(fit).norm()
    assert norm > 1
    assert normalized.figures[-1]["normalization/bias_norm"] == pytest.approx(float(norm), rel=1e-6)
    torch.testing.assert_close(normalized.seen[0], plain.seen[0] / norm, rtol=1e-9, atol=1e-12)


def test_regularizers_keep_their_size(fit) -> None:
    objective = PolicyGradient(entropy_coefficient=0.5)
    plain, _ = run(fit, engine=ScriptedEngine())
    both, _ = run(fit, objective=objective, engine=ScriptedEngine())
    switch = ClippingTriggeredNormalization(rule="max1")
    normalized, _ = run(fit, [switch], objective=objective, engine=ScriptedEngine())
    entropy = both.seen[0] - plain.seen[0]
    factor = normalized.figures[-1]["normalization/factor"]
    assert factor < 1
    torch.testing.assert_close(normalized.seen[0], factor * plain.seen[0] + entropy, rtol=1e-5, atol=1e-7)


def test_without_clipping_it_changes_nothing_and_learns_the_usual_norm(fit) -> None:
    switch = ClippingTriggeredNormalization()
    plain, _ = run(fit, epochs=2)  # one update a collection: every ratio is 1
    watched, _ = run(fit, [switch], epochs=2)
    for left, right in zip(plain.seen, watched.seen, strict=True):
        assert torch.equal(left, right)
    assert list(switch.norms) == pytest.approx([float(gradient.norm()) for gradient in plain.seen], rel=1e-9)
    assert switch.triggered == 0


def test_relative_measures_the_bias_in_usual_gradient_norms(fit) -> None:
    switch = ClippingTriggeredNormalization(rule="relative", tolerance=0.5)
    switch.norms.extend([1.0, 2.0, 10.0])
    normalized, _ = run(fit, [switch], engine=ScriptedEngine())
    bias = normalized.figures[-1]["normalization/bias_norm"]
    assert normalized.figures[-1]["normalization/factor"] == pytest.approx(1 / max(1, bias / (0.5 * 2.0)))
    assert list(switch.norms) == [1.0, 2.0, 10.0]  # an update with clipping does not enter


def test_relative_warns_when_it_never_learns_the_usual_norm(fit) -> None:
    with pytest.warns(UserWarning, match="has seen no update without clipping in 3 collections"):
        run(fit, [ClippingTriggeredNormalization()], engine=ScriptedEngine(), epochs=3)


def test_its_memory_survives_a_round_trip() -> None:
    switch = ClippingTriggeredNormalization(window=2)
    switch.norms.extend([1.0, 2.0, 3.0])
    switch.updates, switch.triggered, switch.collections = 7, 3, 2
    other = ClippingTriggeredNormalization(window=2)
    other.load_state_dict(switch.state_dict())
    assert other.state_dict() == switch.state_dict() == {
        "norms": [2.0, 3.0], "updates": 7, "triggered": 3, "collections": 2,
    }  # fmt: skip


@pytest.mark.parametrize("settings", [{"tolerance": 0.0}, {"window": 0}])
def test_bad_settings(settings) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        ClippingTriggeredNormalization(**settings)
