"""What must coincide, and what must not, through the real module."""

from __future__ import annotations

import dataclasses

import lightning as L
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.critic import Critic
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import load_tokenizer
from sorl_lightning.objectives import Mismatch, PolicyGradient

LEVELS = ("token", "turn", "turn_sum", "sequence")


class SmallGPT2:
    """A small GPT-2, which is float64 throughout where Llama's norms go through float32."""

    def load(self):
        tokenizer = load_tokenizer("sorl:textworld")
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=2, n_head=2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return GPT2LMHeadModel(config), tokenizer


class Gradients(L.Callback):
    """Keeps the gradient of every update, as the optimiser sees it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.clipped: list[int] = []

    def on_before_backward(self, trainer, pl_module, loss):
        terms = pl_module.loss_terms
        self.clipped.append(0 if terms is None or terms.clipped is None else int(terms.clipped.sum()))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in pl_module.parameters()]
        self.seen.append(torch.cat([gradient.flatten().clone() for gradient in gradients]))


def train(fit, *, callbacks=(), environment=None, script=None, critic=None, passes=1, micro_batches=1, epochs=1,
          objective=None, precision="64-true", **settings):  # fmt: skip
    """Gradients of a fit on scripted rollouts, and the module afterwards."""
    recorder = Gradients()
    data = RolloutDataModule(
        environment or Countdown(), ScriptedEngine(script), tasks_per_collection=3, group_size=4, max_turns=4,
        max_tokens=4, context_limit=128, passes=passes, micro_batches=micro_batches,
    )  # fmt: skip
    module = agent(policy=SmallGPT2(), objective=objective or PolicyGradient(**settings), critic=critic)
    fit(module, data, precision=precision, callbacks=[*callbacks, recorder], max_epochs=epochs)
    return recorder, module


def parameters(module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


PPO = {"advantage": "gae"}


@pytest.mark.parametrize(("settings", "critic"), [({}, None), (PPO, Critic()), (PPO, Critic(backbone="policy"))])
@pytest.mark.parametrize("switch", [{"rule": "literal"}, {}, {"norm": "surrogate"}, {"level": "trajectory"}], ids=str)
def test_with_one_update_a_collection_normalization_is_bitwise_absent(fit, settings, critic, switch) -> None:
    runs = []
    for callbacks in ([], [ClippingTriggeredNormalization(**switch)]):
        recorder, module = train(
            fit, ratio="token", old="recompute", callbacks=callbacks, critic=critic, epochs=3, **settings
        )
        assert all(gradient.norm() > 1e-2 for gradient in recorder.seen)
        runs.append(parameters(module))
    assert torch.equal(runs[0], runs[1])


@pytest.mark.parametrize("ratio", ["turn", "sequence"])
def test_with_one_update_a_collection_grpo_has_one_gradient_at_every_level(fit, ratio) -> None:
    token, _ = train(fit, ratio="token", old="recompute")
    other, _ = train(fit, ratio=ratio, old="recompute", callbacks=[ClippingTriggeredNormalization(rule="max1")])
    assert token.seen[0].norm() > 1e-2
    torch.testing.assert_close(other.seen[0], token.seen[0], rtol=0, atol=1e-10)


def test_turn_ppo_is_not_token_ppo_even_on_policy(fit) -> None:
    critic = Critic(lam=0.5, gamma=0.9, whiten=False)
    token, _ = train(fit, ratio="token", old="recompute", critic=critic, **PPO)
    turn, _ = train(fit, ratio="turn", old="recompute", critic=critic, **PPO)
    assert (turn.seen[0] - token.seen[0]).norm() > 1e-3 * token.seen[0].norm()


def test_pooled_advantages_make_turn_ppo_with_and_without_token_gradient_one(fit) -> None:
    critic = Critic(lam=0.5, gamma=0.9, whiten=False)
    pooled, apart = (
        train(fit, ratio="turn", token_gradient=flag, advantage_pooling="turn", passes=3, critic=critic, **PPO)[0]
        for flag in (False, True)
    )
    assert sum(pooled.clipped) > 0
    for left, right in zip(pooled.seen, apart.seen, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-10)


def test_with_one_turn_a_trajectory_turn_and_sequence_are_one(fit) -> None:
    runs = [train(fit, ratio=ratio, passes=3, environment=Countdown([1, 1, 1])) for ratio in ("turn", "sequence")]
    assert sum(runs[0][0].clipped) > 0
    torch.testing.assert_close(parameters(runs[0][1]), parameters(runs[1][1]), rtol=0, atol=1e-12)


def test_with_turns_of_one_token_turn_and_token_are_one(fit) -> None:
    def script(request):
        return [300 + request.seed % 50], [-5.0 - request.seed % 4]

    runs = [train(fit, ratio=ratio, passes=3, script=script) for ratio in ("turn", "token", "turn_sum", "sequence")
            if ratio != "turn_sum"]  # fmt: skip
    assert sum(runs[0][0].clipped) > 0
    torch.testing.assert_close(parameters(runs[0][1]), parameters(runs[1][1]), rtol=0, atol=1e-12)
    assert not torch.allclose(parameters(runs[0][1]), parameters(runs[2][1]), rtol=0, atol=1e-6)


class OnlyBias(PolicyGradient):
    """C by itself."""

    def terms(self, batch, logprobs, entropy, weights):
        terms, metrics = super().terms(batch, logprobs, entropy, weights)
        return dataclasses.replace(terms, policy=terms.clip_bias, clip_bias=None), metrics


class BiasAtLast(OnlyBias):
    """An update as any other, then C by itself."""

    def terms(self, batch, logprobs, entropy, weights):
        first = torch.equal(logprobs[batch.generated], batch.old_logprobs[batch.generated].to(logprobs))
        return (PolicyGradient if first else OnlyBias).terms(self, batch, logprobs, entropy, weights)


@pytest.mark.parametrize("old", ["engine", "recompute"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("ratio", LEVELS)
def test_unclipped_less_c_is_clipped(fit, ratio, dual_clip, old) -> None:
    """To the trainer's own log-probabilities nothing is clipped in the first update, and some tokens in the second."""
    settings = {"ratio": ratio, "i_know": ratio == "turn_sum", "old": old, "passes": 1 + (old == "recompute")}
    narrow = {"epsilon_low": 1e-3, "epsilon_high": 1e-3} if old == "recompute" else {}
    alone = {**settings, **narrow, "dual_clip": dual_clip}
    only = (OnlyBias if old == "engine" else BiasAtLast)(**{k: v for k, v in alone.items() if k != "passes"})
    clipped, _ = train(fit, **alone)
    bias, _ = train(fit, objective=only, passes=settings["passes"])
    unclipped, _ = train(fit, epsilon_low=1e9, epsilon_high=1e9, **settings)
    assert clipped.clipped[-1] > 0
    assert sum(unclipped.clipped) == 0
    # losses are minimised: their gradients are -grad J
    torch.testing.assert_close(-unclipped.seen[-1] - bias.seen[-1], -clipped.seen[-1], rtol=1e-10, atol=1e-10)


def test_a_dual_clip_bounds_what_a_negative_advantage_can_ask(fit) -> None:
    with_it, _ = train(fit, ratio="token", dual_clip=1.5)
    without, _ = train(fit, ratio="token")
    assert with_it.clipped[0] > without.clipped[0]


def test_a_mask_leaves_out_and_a_truncation_holds(fit) -> None:
    def gradient(**settings):
        return train(fit, old="recompute", ratio="token", **settings)[0].seen[0]

    plain = gradient()
    assert torch.equal(gradient(mismatch=Mismatch(threshold=1.0)), gradient(mismatch=Mismatch(threshold=1.0)))
    held = gradient(mismatch=Mismatch(correction="truncate", threshold=1e6))
    masked = gradient(mismatch=Mismatch(correction="mask", threshold=1e6))
    torch.testing.assert_close(held, masked, rtol=0, atol=0)
    assert not torch.allclose(held, plain)
    assert gradient(mismatch=Mismatch(correction="mask", threshold=1.0)).norm() < held.norm()


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_a_critics_update_is_the_same_in_any_micro_batches(fit, micro_batches, backbone) -> None:
    settings = {"critic": Critic(backbone=backbone, lam=0.9), "passes": 2, "kl_coefficient": 0.1, **PPO}
    whole, module = train(fit, **settings)
    parts, other = train(fit, micro_batches=micro_batches, **settings)
    assert len(whole.seen) == len(parts.seen) == 2
    torch.testing.assert_close(parameters(other), parameters(module), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ratio": "turn_sum"}, "i_know"),
        ({"dual_clip": 1.1}, "dual_clip=1.1 must be above"),
        ({"mismatch": Mismatch()}, "objective.old must be 'recompute', got 'engine'"),
        ({"kl_in": "reward", "kl_coefficient": 0.1}, "objective.advantage='gae' reads, got 'grpo'"),
        ({"kl_in": "reward", **PPO}, "takes nothing off the reward at objective.kl_coefficient=0"),
        (
            {"kl_in": "reward", "kl_coefficient": 0.1, "kl_estimator": "k3", **PPO},
            "kl_estimator='k3'.*kl_in='reward'",
        ),
        ({"kl_in": "reward", "kl_coefficient": 0.1, "kl_on": "signal", **PPO}, "kl_on='signal'.*kl_in='reward'"),
        ({"kl_on": "signal"}, "kl_on='signal' needs a KL term, and objective.kl_coefficient=0"),
        ({"advantage_pooling": "turn"}, "advantage_pooling='turn' .* objective.advantage='gae' only, got 'grpo'"),
        ({"i_know": True}, "i_know=true allows objective.ratio='turn_sum', got 'turn'"),
        ({"turn_discount": 0.9}, "turn_return and gigpo only, got 'grpo'"),
        ({"token_gradient": True, "ratio": "token"}, "token_gradient changes nothing"),
        ({"turn_discount": 1.5, "advantage": "gigpo"}, "turn_discount must be in"),
    ],
)
def test_wrong_combinations_name_both_sides(settings, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        PolicyGradient(**settings)


def test_gae_needs_a_critic_and_a_critic_needs_gae(fit) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a critic, and model\.critic is null"):
        train(fit, **PPO)
    with pytest.raises(ConfigurationError, match=r"model\.critic is set, but no advantage comes.*advantage='gae'"):
        train(fit, critic=Critic())
