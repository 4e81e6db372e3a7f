"""Importance ratios at four levels, and what they do about an engine that is not the trainer."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_choice, check_range, check_same_shape
from sorl_lightning.functional.turns import Segments, fill, segments

Level = Literal["token", "turn", "turn_sum", "sequence"]
Correction = Literal["truncate", "mask"]


def importance_ratio(
    logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    turn: Int[Tensor, "B T"],
    level: Level = "turn",
    token_gradient: bool = False,
    trajectory: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Importance ratio of each token under the policy; 1 where the policy did not generate it.

    With l_j = logprobs - behaviour_logprobs of token j, the ratio of token t is

        token     exp(l_t)
        turn      exp(mean of l_j over the turn of t)            geometric mean, free of the turn's length
        turn_sum  exp(sum of l_j over the turn of t)             for study: explodes with length
        sequence  exp(mean of l_j over the trajectory of t)      GSPO

    The gradient flows through the whole mean. A log-ratio beyond the largest exponent that the dtype carries (about
    80 nats in float32) is held there, with no gradient, so that a clipped token never turns into nan.

    Args:
        logprobs: log-probability of each token under the policy, nats; keeps its graph.
        behaviour_logprobs: the same under the weights that sampled it, nats.
        turn: turn of each token, -1 where the policy did not generate it. Whatever the other arguments hold there,
            inf and nan included, is never read.
        level: what the ratio is pooled over.
        token_gradient: keep the pooled value, but let the gradient flow through the token's own log-ratio alone. With
            an advantage that is constant over the pool the summed gradient of level "turn" and "sequence" is the same.
        trajectory: trajectory of each token; None: one per row. Rows that share a trajectory are pooled together.

    Raises:
        ValueError: an unknown ``level``, or shapes that differ.

    Source: Li et al. 2025, arXiv:2511.20718, as reconstructed in docs/papers/sorl.md; "sequence" is GSPO, Zheng et al.
    2025, arXiv:2507.18071.
    """
    check_choice("level", level, Level)
    check_same_shape(logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, turn=turn, trajectory=trajectory)
    generated = turn >= 0
    log_ratio = logprobs[generated] - behaviour_logprobs[generated]
    if level != "token":
        groups = segments(turn, trajectory, "trajectory" if level == "sequence" else "turn")
        log_ratio = _pool(log_ratio, groups, level, token_gradient)
    largest = math.log(torch.finfo(log_ratio.dtype).max) - 8
    return fill(generated, log_ratio.clamp(max=largest).exp(), elsewhere=1.0)


def mismatch_correction(
    old_logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    turn: Int[Tensor, "B T"],
    kind: Correction = "truncate",
    level: Level = "token",
    threshold: Number = 2.0,
    trajectory: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Factor of each token's loss that makes up for an engine whose probabilities differ from the trainer's.

        truncate  min(r, threshold)
        mask      r where r <= threshold, 0 above

    r is the importance ratio of the trainer's policy to the engine's under the same weights. No gradient flows through.

    Args:
        old_logprobs: log-probability under the trainer's policy at the start of the collection, nats.
        behaviour_logprobs: the same as the engine gave it with the token.
        turn: turn of each token, -1 where the policy did not generate it (factor 1 there).
        kind: what becomes of a ratio above ``threshold``.
        level: what the ratio is pooled over.
        threshold: largest factor, at least 1.
        trajectory: trajectory of each token; None: one per row.

    Raises:
        ValueError: an unknown ``kind`` or ``level``, a ``threshold`` below 1, or shapes that differ.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (truncate); Liu et
    al. 2025, "When speed kills stability" (mask); "turn" is ours.
    """
    check_choice("kind", kind, Correction)
    check_range("threshold", threshold, 1.0, math.inf)
    ratio = importance_ratio(old_logprobs, behaviour_logprobs, turn, level, trajectory=trajectory).detach()
    return ratio.clamp(max=threshold) if kind == "truncate" else torch.where(ratio > threshold, 0, ratio)


def _pool(log_ratio: Tensor, groups: Segments, level: Level, token_gradient: bool) -> Tensor:
    pool = groups.sum if level == "turn_sum" else groups.mean
    pooled = pool(log_ratio)[groups.index]
    return pooled.detach() + (log_ratio - log_ratio.detach()) if token_gradient else pooled
