"""Weights of the tokens: the aggregation of every loss.

Each kind but ``fixed_weights`` sums to 1 over the optimiser batch and is 0 where ``turn`` is -1. Compute them on the
whole batch, or on one rank's share of it with the ``counts`` of the whole; ``weighted_sum`` then gives the same
gradient for any partition into micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_choice, check_count, check_range, check_same_shape
from sorl_lightning.functional.turns import Segments, segments, turn_statistics
from sorl_lightning.types import TurnStatistics

Tail = Literal["drop", "pool"]


def trajectory_weights(
    turn: Int[Tensor, "B T"], trajectory: Int[Tensor, "B T"] | None = None, counts: TurnStatistics | None = None
) -> Float[Tensor, "B T"]:
    """Every trajectory counts equally, and equally over its tokens: 1 / (B N_b).

    B counts the trajectories with a generated token and N_b the generated tokens of trajectory b, over all its rows.
    Known as ``seq_mean_token_mean``.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        trajectory: trajectory of each token; None: one per row.
        counts: the statistics of the whole optimiser batch, where ``turn`` is one rank's share of it.

    Raises:
        ValueError: shapes that differ.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.2 (w_traj).
    """
    return _equal(segments(turn, trajectory, "trajectory"), None if counts is None else _trajectories(counts))


def each_turn_weights(
    turn: Int[Tensor, "B T"], trajectory: Int[Tensor, "B T"] | None = None, counts: TurnStatistics | None = None
) -> Float[Tensor, "B T"]:
    """Every turn of every trajectory counts equally, and equally over its tokens. Known as ``turn_mean``.

    Unlike ``turn_weights`` it gives deep turns no more than their number.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        trajectory: trajectory of each token; None: one per row.
        counts: the statistics of the whole optimiser batch, where ``turn`` is one rank's share of it.

    Raises:
        ValueError: shapes that differ.
    """
    return _equal(segments(turn, trajectory, "turn"), None if counts is None else counts.trajectories.sum())


def token_weights(turn: Int[Tensor, "B T"], counts: TurnStatistics | None = None) -> Float[Tensor, "B T"]:
    """Every generated token counts equally: 1 / N. Known as ``token_mean``.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        counts: the statistics of the whole optimiser batch, where ``turn`` is one rank's share of it.
    """
    generated = turn >= 0
    tokens = generated.sum() if counts is None else counts.tokens.sum().long()
    return generated / tokens.clamp(min=1)


def fixed_weights(
    turn: Int[Tensor, "B T"], length: int, trajectory: Int[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T"]:
    """Every generated token weighs 1 / (B length), whatever its trajectory's length: the one kind with no sum of 1.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        length: the most tokens that a trajectory can generate.
        trajectory: trajectory of each token; None: one per row.

    Raises:
        ValueError: ``length`` below 1, or shapes that differ.

    Source: Liu et al. 2025, arXiv:2503.20783 (Dr.GRPO).
    """
    check_count("length", length)
    return (turn >= 0) / (max(segments(turn, trajectory, "trajectory").count, 1) * length)


def turn_weights(
    turn: Int[Tensor, "B T"],
    trajectory: Int[Tensor, "B T"] | None = None,
    min_trajectories: int = 8,
    min_fraction: Number = 0.15,
    tail: Tail = "drop",
    counts: TurnStatistics | None = None,
) -> Float[Tensor, "B T"]:
    """Every well-populated turn index counts equally over the batch: 1 / (|V| N_t) for t in V.

    V holds the turns that ``valid_turns`` finds and N_t counts the batch's tokens at turn t. With an empty V these are
    the trajectory weights.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        trajectory: trajectory of each token; None: one per row.
        min_trajectories: fewest trajectories that a turn in V is reached by.
        min_fraction: fewest of them, as a share of all trajectories.
        tail: what tokens outside V weigh: "drop" nothing, "pool" together as much as one turn of V, equal per token.
        counts: the statistics of the whole optimiser batch, where ``turn`` is one rank's share of it.

    Raises:
        ValueError: an unknown ``tail``, thresholds out of range, ``counts`` that lack turns of this share, or shapes
            that differ.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.2 (w_turn); "pool" is ours.
    """
    check_choice("tail", tail, Tail)
    share = turn_statistics(turn, trajectory)
    counts = share if counts is None else counts
    _check_share(share, counts)
    valid = valid_turns(counts, min_trajectories, min_fraction)
    if not valid.any():
        return trajectory_weights(turn, trajectory, counts)
    tail_tokens = counts.tokens[~valid].sum()
    pool = tail == "pool" and bool(tail_tokens > 0)
    groups = valid.sum() + pool
    by_turn = torch.where(valid, 1 / (groups * counts.tokens), 1 / (groups * tail_tokens) if pool else 0.0)
    return torch.where(turn >= 0, by_turn.to(torch.get_default_dtype())[turn.clamp(min=0)], 0)


def valid_turns(counts: TurnStatistics, min_trajectories: int = 8, min_fraction: Number = 0.15) -> Bool[Tensor, "H"]:
    """Whether each turn is reached by max(min_trajectories, ceil(min_fraction B)) trajectories.

    With fewer than ``min_trajectories`` trajectories in the batch, a turn needs as many as turn 0 has.

    Args:
        counts: statistics of the whole optimiser batch.
        min_trajectories: fewest trajectories.
        min_fraction: fewest trajectories, as a share of all B.

    Raises:
        ValueError: ``min_trajectories`` below 1 or ``min_fraction`` outside [0, 1].

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.2 (V); the rule for small batches is ours.
    """
    check_count("min_trajectories", min_trajectories)
    check_range("min_fraction", min_fraction, 0.0, 1.0)
    total = float(_trajectories(counts))
    if total < min_trajectories:
        needed = float(counts.trajectories[0]) if len(counts.trajectories) else 0.0
    else:
        needed = max(min_trajectories, math.ceil(min_fraction * total - 1e-9))  # .07 * 100 is 7.000000000000001
    return counts.trajectories >= max(needed, 1)


def blend(
    trajectory_weights: Float[Tensor, "B T"], turn_weights: Float[Tensor, "B T"], alpha: Number
) -> Float[Tensor, "B T"]:
    """(1 - alpha) trajectory_weights + alpha turn_weights.

    Args:
        trajectory_weights: weights at ``alpha`` 0.
        turn_weights: weights at ``alpha`` 1.
        alpha: the blend, in [0, 1].

    Raises:
        ValueError: ``alpha`` out of range, or shapes that differ.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.2.
    """
    check_range("alpha", alpha, 0.0, 1.0)
    check_same_shape(trajectory_weights=trajectory_weights, turn_weights=turn_weights)
    return (1 - alpha) * trajectory_weights + alpha * turn_weights


def reweighted(
    weights: Float[Tensor, "B T"], factors: Float[Tensor, "B T"], total: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, "B T"]:
    """``weights`` times ``factors``, brought back to the sum of ``weights``.

    Where every weighed token has factor 0 the weights are all 0: there is nothing to train on.

    Args:
        weights: of the whole optimiser batch.
        factors: 0 or more for each token.
        total: sums a tensor over all ranks, where these are one rank's share; None: they are all.

    Raises:
        ValueError: shapes that differ, or a negative factor.
    """
    check_same_shape(weights=weights, factors=factors)
    if (factors < 0).any():
        raise ValueError(f"factors must be 0 or more, got {float(factors.min())}")
    scaled = weights * factors
    sums = torch.stack([weights.sum(), scaled.sum()])
    before, after = sums if total is None else total(sums)
    return scaled * (before / after) if after > 0 else scaled


def _equal(groups: Segments, number: Tensor | None) -> Tensor:
    """Equal weights of all groups, of which the whole batch has ``number``; None: as many as are here."""
    number = torch.tensor(groups.count) if number is None else number.long()
    return groups.to_tokens(1 / (number * groups.sizes).to(torch.get_default_dtype()))


def _trajectories(counts: TurnStatistics) -> Tensor:
    """B; the largest turn stands in where the last turns were not counted."""
    reached = counts.trajectories.max() if len(counts.trajectories) else counts.trajectories.sum()
    return torch.maximum(counts.all_last_turns.sum(), reached)


def _check_share(share: TurnStatistics, counts: TurnStatistics) -> None:
    depth = len(share.tokens)
    if len(counts.tokens) < depth or bool((counts.tokens[:depth] < share.tokens).any()):
        raise ValueError(
            f"counts must cover this share of the batch: they hold {counts.tokens.tolist()} tokens by turn, "
            f"the share alone {share.tokens.tolist()}"
        )
