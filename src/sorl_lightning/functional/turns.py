"""Which generated tokens belong together, and sums, means and counts over them.

Context and padding (``turn`` -1) are left out before any arithmetic, so whatever they hold, inf and nan included,
reaches neither a value nor a gradient. A worked example, one row that packs trajectories 7 and 9:

    turn         -1   0   0  -1   1  -1   0
    trajectory    7   7   7   7   7   9   9
    turns             a   a       b       c
    trajectories      A   A       A       B
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sorl_lightning.functional.checks import check_choice, check_count, check_same_shape
from sorl_lightning.types import TurnStatistics

Span = Literal["turn", "trajectory"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The generated tokens of a batch, each with its segment (a turn or a trajectory).

    Attributes:
        generated: where the generated tokens are.
        index: segment of each of the G generated tokens, in row-major order, dense from 0.
        count: number of segments.
    """

    generated: Bool[Tensor, "B T"]
    index: Int[Tensor, "G"]
    count: int

    @property
    def sizes(self) -> Int[Tensor, "S"]:
        """Tokens of each segment, at least 1."""
        return torch.bincount(self.index, minlength=self.count)

    def sum(self, values: Float[Tensor, "G"]) -> Float[Tensor, "S"]:
        """Sum of the tokens' values over each segment; differentiable."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def mean(self, values: Float[Tensor, "G"]) -> Float[Tensor, "S"]:
        """Mean of the tokens' values over each segment; differentiable."""
        return self.sum(values) / self.sizes

    def to_tokens(self, values: Float[Tensor, "S"], elsewhere: float = 0.0) -> Float[Tensor, "B T"]:
        """Give every generated token its segment's value, and ``elsewhere`` to the rest; differentiable."""
        return fill(self.generated, values[self.index], elsewhere)


def fill(generated: Bool[Tensor, "B T"], values: Float[Tensor, "G"], elsewhere: float = 0.0) -> Float[Tensor, "B T"]:
    """Put the G generated tokens' values back in place, with ``elsewhere`` around them; differentiable."""
    return values.new_full(generated.shape, elsewhere).masked_scatter(generated, values)


def row_lengths(generated: Bool[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """Tokens of each row up to its last generated one; what follows trains nothing."""
    positions = torch.arange(1, generated.shape[1] + 1, device=generated.device)
    return (positions * generated).amax(dim=1)


def segments(turn: Int[Tensor, "B T"], trajectory: Int[Tensor, "B T"] | None = None, span: Span = "turn") -> Segments:
    """Find the turns or the trajectories of a batch.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        trajectory: trajectory of each token, free where ``turn`` is -1; one id may have tokens in several rows. None:
            one trajectory per row.
        span: what a segment is.

    Raises:
        ValueError: an unknown ``span``, or shapes that differ.
    """
    check_choice("span", span, Span)
    check_same_shape(turn=turn, trajectory=trajectory)
    if trajectory is None:
        trajectory = torch.arange(len(turn), device=turn.device)[:, None].expand_as(turn)
    generated = turn >= 0
    owners, turns = trajectory[generated], turn[generated]
    # Neighbours mostly belong together: only the first of a run of them is sorted.
    first = torch.ones_like(owners, dtype=torch.bool)
    first[1:] = (owners[1:] != owners[:-1]) | (turns[1:] != turns[:-1])
    ids, index = owners[first].unique(return_inverse=True)
    if span == "turn":
        numbers, number = turns[first].unique(return_inverse=True)
        ids, index = (index * len(numbers) + number).unique(return_inverse=True)
    return Segments(generated=generated, index=index[first.cumsum(0) - 1], count=len(ids))


def pooled(
    values: Float[Tensor, "B T"],
    turn: Int[Tensor, "B T"],
    trajectory: Int[Tensor, "B T"] | None = None,
    span: Span = "turn",
    reduction: Reduction = "mean",
) -> Float[Tensor, "B T"]:
    """Replace each generated token's value by the mean (or sum) over its turn or trajectory; 0 elsewhere.

    With advantages as ``values`` this is the option ``advantage_pooling: turn``. Gradients flow through the pool.

    Args:
        values: any number per token; read only where ``turn`` is not -1.
        turn: turn of each token, -1 where the policy did not generate it.
        trajectory: trajectory of each token; None: one per row.
        span: what is pooled over.
        reduction: how.

    Raises:
        ValueError: an unknown ``span`` or ``reduction``, or shapes that differ.
    """
    check_choice("reduction", reduction, Reduction)
    check_same_shape(values=values, turn=turn)
    groups = segments(turn, trajectory, span)
    pool = groups.mean if reduction == "mean" else groups.sum
    return groups.to_tokens(pool(values[groups.generated]))


def turn_statistics(
    turn: Int[Tensor, "B T"],
    trajectory: Int[Tensor, "B T"] | None = None,
    divergence: Float[Tensor, "B T"] | None = None,
    success: Bool[Tensor, "B T"] | None = None,
    depth: int | None = None,
) -> TurnStatistics:
    """Count trajectories and tokens by turn index.

    All fields add up over micro-batches and ranks, with one condition: the last turns are right only where a
    trajectory's rows are counted together.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        trajectory: trajectory of each token; None: one per row.
        divergence: divergence of student and teacher at each token, nats; None counts as 0.
        success: whether the token's trajectory succeeded; None counts as failure.
        depth: number of turns to count, the same on all ranks; None: one more than the largest turn here.

    Raises:
        ValueError: a turn at or beyond ``depth``, or shapes that differ.
    """
    check_same_shape(turn=turn, divergence=divergence, success=success)
    turns, trajectories = segments(turn, trajectory, "turn"), segments(turn, trajectory, "trajectory")
    of_token = turn[turns.generated]
    deepest = int(of_token.max()) if len(of_token) else -1
    depth = deepest + 1 if depth is None else depth
    check_count("depth", depth, deepest + 1)

    def by_turn(indices: Tensor, amounts: Tensor | float = 1.0) -> Tensor:
        amounts = torch.as_tensor(amounts, dtype=torch.float64, device=turn.device).expand(len(indices))
        return amounts.new_zeros(depth).index_add(0, indices, amounts)

    def by_segment(groups: Segments, values: Tensor) -> Tensor:
        return values.new_zeros(groups.count).scatter_reduce(0, groups.index, values, "amax", include_self=False)

    last = by_segment(trajectories, of_token)
    won = by_segment(trajectories, torch.zeros_like(of_token) if success is None else success[turns.generated].long())
    return TurnStatistics(
        trajectories=by_turn(by_segment(turns, of_token)),
        tokens=by_turn(of_token),
        divergence_sum=by_turn(of_token, 0.0 if divergence is None else divergence.detach()[turns.generated]),
        success_last_turns=by_turn(last[won > 0]),
        all_last_turns=by_turn(last),
    )
