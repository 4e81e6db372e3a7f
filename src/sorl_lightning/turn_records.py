"""What a collection shows turn by turn while it is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sorl_lightning.functional.turns import turn_statistics
from sorl_lightning.types import RolloutBatch, Trajectory, TurnProfile, TurnStatistics


class TurnRecords:
    """Adds up the micro-batches of a collection's first pass, in which each generated token is trained once.

    Args:
        trajectories: of the collection, as numbered by the rows' ``trajectory``.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._success = torch.tensor([trajectory.success for trajectory in trajectories])
        self.statistics = outcomes(trajectories)
        self.profile: TurnProfile | None = None

    def add(self, batch: RolloutBatch, entropy: Tensor, weights: Tensor) -> None:
        """Take in one micro-batch; without a teacher its divergence counts as 0. No graph is kept."""
        entropy = entropy.detach()
        divergence = torch.zeros_like(entropy) if batch.comparison is None else batch.comparison.divergence.detach()
        counted = turn_statistics(batch.turn, batch.trajectory, divergence)
        none = torch.zeros_like(counted.tokens)
        self.statistics += TurnStatistics(
            trajectories=none.cpu(),
            tokens=counted.tokens.cpu(),
            divergence_sum=counted.divergence_sum.cpu(),
            success_last_turns=none.cpu(),
            all_last_turns=none.cpu(),
        )
        profile = self._profile_of(batch, divergence, entropy, weights)
        self.profile = profile if self.profile is None else self.profile + profile

    def _profile_of(self, batch: RolloutBatch, divergence: Tensor, entropy: Tensor, weights: Tensor) -> TurnProfile:
        def by_turn(values: Tensor) -> Tensor:
            return turn_statistics(batch.turn, batch.trajectory, values).divergence_sum.cpu()

        generated = batch.generated.double()
        failed = generated * ~self._success.to(batch.turn.device)[batch.trajectory]
        teacher_entropy = torch.zeros_like(entropy) if batch.comparison is None else batch.comparison.teacher_entropy
        return TurnProfile(
            tokens=by_turn(generated),
            failed_tokens=by_turn(failed),
            divergence=by_turn(divergence),
            failed_divergence=by_turn(divergence * failed),
            student_entropy=by_turn(entropy),
            teacher_entropy=by_turn(teacher_entropy),
            loss=by_turn(weights * divergence),
        )


def outcomes(trajectories: Sequence[Trajectory]) -> TurnStatistics:
    """Who reaches which turn, and how it ends; tokens and divergence are left at 0.

    Only turns with a token to train count: not those of an expert, nor empty ones.
    """
    reached: list[list[int]] = [
        [turn.index for turn in trajectory.turns if turn.author != "expert" and turn.completion.token_ids]
        for trajectory in trajectories
    ]
    depth = max((turns[-1] + 1 for turns in reached if turns), default=0)
    trajectory_counts, won, ended = torch.zeros(3, depth, dtype=torch.float64)
    for trajectory, turns in zip(trajectories, reached, strict=True):
        trajectory_counts[turns] += 1
        if turns:
            ended[turns[-1]] += 1
            won[turns[-1]] += trajectory.success
    none = torch.zeros(depth, dtype=torch.float64)
    return TurnStatistics(
        trajectories=trajectory_counts, tokens=none, divergence_sum=none, success_last_turns=won, all_last_turns=ended
    )
