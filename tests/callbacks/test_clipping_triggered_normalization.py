"""The factor acts on the policy's gradient alone, and only when something was clipped."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.critic import Critic
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import SmallLlama, recompute_activations
from sorl_lightning.objectives import PolicyGradient


class Gradients(L.Callback):
    """Keeps the gradient as the optimiser would see it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.figures: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(torch.cat([p.grad.flatten().clone() for p in pl_module.parameters() if p.requires_grad]))

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


def scaled(fit, micro_batches=1, objective=None, **settings):
    """Gradient and figures of one update under max1, in some number of micro-batches."""
    switch = ClippingTriggeredNormalization(rule="max1", **settings)
    recorder, _ = run(fit, [switch], objective=objective, engine=ScriptedEngine(), micro_batches=micro_batches)
    return recorder.seen[0], recorder.figures[-1]


@pytest.mark.parametrize("level", ["batch", "trajectory"])
@pytest.mark.parametrize("norm", ["exact", "surrogate"])
def test_any_split_into_micro_batches_gives_the_same_factor(fit, norm, level) -> None:
    objective = PolicyGradient(entropy_coefficient=0.1)
    whole, figures = scaled(fit, norm=norm, level=level, objective=objective)
    assert figures["normalization/factor"] < 0.9
    for micro_batches in (2, 4):
        parts, others = scaled(fit, micro_batches, norm=norm, level=level, objective=objective)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-8)  # Llama's norms are float32
        for name in ("bias_norm", "policy_norm", "factor", "triggered"):
            assert others[f"normalization/{name}"] == pytest.approx(figures[f"normalization/{name}"], rel=1e-6)


def test_the_surrogate_is_the_token_vector_times_the_tokens(fit) -> None:
    class Kept(PolicyGradient):
        def terms(self, batch, logprobs, entropy, weights):
            terms, metrics = super().terms(batch, logprobs, entropy, weights)
            share = weights * metrics["ratio"] * batch.advantages * terms.clipped
            kept.append(float(share.norm()) * int(batch.generated.sum()))
            return terms, metrics

    kept: list[float] = []
    _, figures = scaled(fit, norm="surrogate", objective=Kept())
    assert figures["normalization/bias_norm"] == pytest.approx(kept[0], rel=1e-6)


def test_a_trajectory_alone_is_scaled_by_what_it_would_be_as_the_whole_batch(fit) -> None:
    """With one trajectory that has an advantage, its factor is that of level "batch" for a batch of it alone."""

    class OneTrajectory(PolicyGradient):
        def terms(self, batch, logprobs, entropy, weights):
            own = (batch.trajectory == 0) & batch.generated
            weights = torch.where(own, 1.0 / own.sum(), 0.0)
            batch = batch.replace(advantages=torch.where(own, -2.0, 0.0))
            return super().terms(batch, logprobs, entropy, weights)

    by_batch, figures = scaled(fit, objective=OneTrajectory())
    alone, others = scaled(fit, level="trajectory", objective=OneTrajectory())
    assert figures["normalization/factor"] == pytest.approx(others["normalization/factor"], rel=1e-6)
    assert figures["normalization/factor"] < 1
    torch.testing.assert_close(alone, by_batch, rtol=1e-4, atol=1e-6)  # Llama's norms are float32


def test_frozen_parameters_and_recomputed_activations_change_nothing(fit) -> None:
    class Adapted(SmallLlama):
        """As under adapters: only the last layer's projections train."""

        def load(self):
            model, tokenizer = super().load()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("mlp" in name)
            return model, tokenizer

    class Recomputing(Adapted):
        def load(self):
            model, tokenizer = super().load()
            recompute_activations(model)
            return model, tokenizer

    size = {"tokenizer": "sorl:textworld", "hidden_size": 32, "num_hidden_layers": 1, "context_length": 256}
    results = []
    for source in (Adapted(**size), Recomputing(**size)):
        recorder = Gradients()
        data = RolloutDataModule(Countdown(), ScriptedEngine(), tasks_per_collection=3, group_size=4, max_turns=4,
                                 max_tokens=4, context_limit=128)  # fmt: skip
        switch = ClippingTriggeredNormalization(rule="max1")
        module = agent(policy=source, objective=PolicyGradient(entropy_coefficient=0.1))
        fit(module, data, precision="64-true", callbacks=[switch, recorder])
        results.append((recorder.seen[0], recorder.figures[-1]))
    (plain, figures), (again, others) = results
    assert figures["normalization/bias_norm"] > 0
    torch.testing.assert_close(again, plain, rtol=1e-7, atol=1e-10)
    assert others["normalization/bias_norm"] == pytest.approx(figures["normalization/bias_norm"], rel=1e-7)


def test_a_value_gradient_keeps_its_size(fit) -> None:
    def gradient(callbacks, objective):
        recorder = Gradients()
        data = RolloutDataModule(Countdown(), ScriptedEngine(), tasks_per_collection=3, group_size=4, max_turns=4,
                                 max_tokens=4, context_limit=128)  # fmt: skip
        module = agent(objective=objective, critic=Critic(backbone="policy"))
        torch.manual_seed(0)
        module.configure_model()
        torch.nn.init.normal_(module.value_network.linear.weight)
        fit(module, data, precision="64-true", callbacks=[*callbacks, recorder])
        return recorder.seen[0], recorder.figures[-1]

    class Silent(PolicyGradient):
        def terms(self, batch, logprobs, entropy, weights):
            return super().terms(batch.replace(advantages=0 * batch.advantages), logprobs, entropy, weights)

    value, _ = gradient([], Silent(advantage="gae"))
    both, _ = gradient([], PolicyGradient(advantage="gae"))
    scaled_, figures = gradient([ClippingTriggeredNormalization(rule="plus1")], PolicyGradient(advantage="gae"))
    factor = figures["normalization/factor"]
    assert factor < 0.9
    assert value.norm() > 0.1
    torch.testing.assert_close(scaled_, value + factor * (both - value), rtol=1e-5, atol=1e-6)


def test_ddp_and_loss_scaling_are_refused(trainer) -> None:
    switch = ClippingTriggeredNormalization()
    for settings, message in [({"strategy": "ddp"}, "strategy ddp"), ({"precision": "16-mixed"}, "not 16-mixed")]:
        runner = trainer(**settings) if "strategy" in settings else trainer()
        if "precision" in settings:
            runner.strategy.precision_plugin.precision = settings["precision"]
        with pytest.raises(ConfigurationError, match=message):
            switch.setup(runner, agent(), "fit")


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
