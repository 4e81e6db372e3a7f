"""The clipped surrogate, what clipping takes from its gradient, and the sum that every loss ends in."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_choice, check_positive, check_same_shape

FactorRule = Literal["max1", "literal", "plus1", "relative"]


def clipped_surrogate(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    epsilon_low: Number = 0.2,
    epsilon_high: Number = 0.2,
    dual_clip: Number | None = None,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """PPO's clipped surrogate of each token, as a loss, and the tokens that it clips.

        loss = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)
        clipped = (A > 0 and r > 1 + epsilon_high) or (A < 0 and r < 1 - epsilon_low)

    With ``dual_clip`` c the loss of a negative advantage is at most -c A: tokens with A < 0 and r > c are clipped too.

    The gradient is exactly 0 at clipped tokens and -A times that of the ratio at all others.

    Args:
        ratio: importance ratio of each token; keeps its graph.
        advantages: advantage of each token; no gradient flows into it.
        epsilon_low: clip range below 1.
        epsilon_high: clip range above 1; larger than ``epsilon_low`` it is DAPO's asymmetric clip.
        dual_clip: largest ratio at a negative advantage, above 1 + ``epsilon_high``; None sets no bound.

    Raises:
        ValueError: an epsilon that is not positive, a ``dual_clip`` inside the clip range, or shapes that differ.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    check_positive("epsilon_low", epsilon_low)
    check_positive("epsilon_high", epsilon_high)
    check_same_shape(ratio=ratio, advantages=advantages)
    value, advantages = ratio.detach(), advantages.detach()
    low, high = 1 - epsilon_low, 1 + epsilon_high
    clipped = ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))
    held = value.clamp(low, high)
    if dual_clip is not None:
        if not high < dual_clip < math.inf:
            raise ValueError(f"dual_clip must be above 1 + epsilon_high = {high:g} and finite, got {dual_clip!r}")
        beyond = (advantages < 0) & (value > dual_clip)
        clipped, held = clipped | beyond, torch.where(beyond, dual_clip, held)
    return -torch.where(clipped, held, ratio) * advantages, clipped


def clip_bias(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], clipped: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Surrogate of the clipped tokens, 0 elsewhere: its weighted sum has the clipping bias C as gradient.

        C = grad of sum_t w_t 1{clipped(t)} r_t A_t,     grad J_unclipped - C = grad J_clipped

    Args:
        ratio: importance ratio of each token; keeps its graph.
        advantages: advantage of each token; no gradient flows into it.
        clipped: the tokens that ``clipped_surrogate`` found.

    Raises:
        ValueError: shapes that differ.

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md.
    """
    check_same_shape(ratio=ratio, advantages=advantages, clipped=clipped)
    return torch.where(clipped, ratio, 0) * torch.where(clipped, advantages.detach(), 0)


def clipped_value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    epsilon: Number | None = 0.2,
) -> Float[Tensor, "B T"]:
    """Half the squared error of each value; with ``epsilon`` the larger of it and that of the clipped value.

        loss = max((V - R)^2, (V_old + clip(V - V_old, -epsilon, epsilon) - R)^2) / 2

    Args:
        values: the critic's values; keeps its graph.
        old_values: its values at the start of the collection.
        returns: its targets.
        epsilon: how far a value may move in one collection before its gradient ends; None lets it.

    Raises:
        ValueError: an ``epsilon`` that is not positive, or shapes that differ.

    Source: Schulman et al. 2017's code (openai/baselines, ppo2), which the paper does not describe.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    error = (values - returns.detach()).square()
    if epsilon is not None:
        check_positive("epsilon", epsilon)
        held = old_values.detach() + (values - old_values.detach()).clamp(-epsilon, epsilon)
        error = torch.maximum(error, (held - returns.detach()).square())
    return error / 2


def clip_factor(bias_norm: Number, rule: FactorRule = "max1", reference_norm: Number | None = None) -> float:
    """Factor by which clipping-triggered normalization scales the policy gradient of one update.

        max1      1 / max(1, n)            never amplifies
        literal   1 / max(n, 1e-8)         as reported of the paper; amplifies where n < 1
        plus1     1 / (1 + n)
        relative  1 / max(1, n / m)        free of the gradient's scale

    Args:
        bias_norm: n, the L2 norm of the clipping bias over all parameters and ranks. 0 (nothing clipped) gives 1;
            a nan stays one, for the caller's check for finite gradients.
        rule: which of the above.
        reference_norm: m, the norm that the rule "relative" compares with, say a running median of the policy
            gradient's norm; None while there is none yet, which gives 1. The other rules do not read it.

    Raises:
        ValueError: an unknown ``rule``, a negative ``bias_norm`` or a ``reference_norm`` that is not positive.

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md, where all but "literal" are ours.
    """
    check_choice("rule", rule, FactorRule)
    if bias_norm < 0:
        raise ValueError(f"bias_norm must not be negative, got {bias_norm!r}")
    if reference_norm is not None:
        check_positive("reference_norm", reference_norm)
    if bias_norm == 0:
        return 1.0
    if rule == "literal":
        return 1 / max(bias_norm, 1e-8)
    if rule == "plus1":
        return 1 / (1 + bias_norm)
    if rule == "relative":
        return 1.0 if reference_norm is None else 1 / max(bias_norm / reference_norm, 1.0)
    return 1 / max(bias_norm, 1.0)


def weighted(values: Float[Tensor, "*shape"], weights: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``weights * values``, exactly 0 where the weight is, in value and gradient, even at inf or nan.

    Raises:
        ValueError: shapes that differ.
    """
    check_same_shape(values=values, weights=weights)
    return torch.where(weights == 0, 0, values) * weights


def weighted_sum(values: Float[Tensor, "*shape"], weights: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum of ``weights * values``: the one reduction of every loss.

    Weights sum to 1 over the whole optimiser batch, so that its micro-batches and ranks only ever add up. A batch of
    padding gives a 0 that still has a graph.

    Args:
        values: a loss per token, nats or its own unit; keeps its graph.
        weights: weight of each token. Where it is 0 the value and its gradient are exactly 0, even at inf or nan.

    Raises:
        ValueError: shapes that differ.
    """
    return weighted(values, weights).sum()
