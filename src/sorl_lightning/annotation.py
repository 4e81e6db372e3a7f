"""What an objective needs of fresh rows beside what the engine gave: advantages, log-probabilities, values, scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_lightning.control import TurnWeighting
from sorl_lightning.critic import Critic
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.objectives import HasCriticRewards, HasOldPolicy, Objective
from sorl_lightning.sharding import is_sharded
from sorl_lightning.student_teacher import parts, recorded, token_signals
from sorl_lightning.teachers import Teacher
from sorl_lightning.types import Ending, RolloutBatch, Trajectory
from sorl_lightning.value_networks import ValueHead, ValueNetwork, values_after


@dataclass(frozen=True, kw_only=True)
class Annotator:
    """Annotates the rows of a collection before it is trained, on all ranks together.

    Args:
        objective: says what it needs.
        policy: with the weights that the rows were sampled by.
        reference: the frozen network of the KL; None: there is no KL.
        critic: makes advantages of values; None: the objective does, of rewards.
        value_network: the critic's.
        teacher: of a distillation.
        turn_weighting: the knob.
        temperature: of the rollouts.
        device: of the networks; rows are on the CPU.
    """

    objective: Objective
    policy: PolicyNetwork
    reference: PolicyNetwork | None
    critic: Critic | None
    value_network: ValueHead | ValueNetwork | None
    teacher: Teacher | None
    turn_weighting: TurnWeighting
    temperature: float
    device: torch.device

    @torch.no_grad()
    def annotate(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """``rows`` of ``trajectories`` with all that the objective needs."""
        if self.reference is not None:
            if not is_sharded(self.reference):
                self.reference.to(self.device)
            rows = rows.replace(reference_logprobs=self._logprobs(self.reference, rows))
        if isinstance(self.objective, HasOldPolicy) and self.objective.needs_old_logprobs:
            rows = rows.replace(old_logprobs=self._logprobs(self.policy, rows))
        rows = self._rewarded(rows, trajectories)
        rows = recorded(self.objective, self.teacher, rows, self.temperature)
        return rows if self.turn_weighting.factor is None else self._weighted(rows)

    def _rewarded(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Advantages from rewards or the critic; 0 at tokens that the teacher played."""
        if self.critic is not None:
            rows = self._estimated(self.critic, rows, trajectories)
        else:
            # A rank without trajectories asks too: some kinds compare those of all ranks.
            advantages = self.objective.advantages(trajectories)
            rows = rows.replace(advantages=spread(advantages if trajectories else torch.zeros(1), rows))
        if rows.by_teacher is None:
            return rows
        return rows.replace(advantages=rows.advantages.masked_fill(rows.by_teacher, 0.0))

    def _estimated(self, critic: Critic, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        assert isinstance(self.objective, HasCriticRewards)
        assert self.value_network is not None
        truncated = torch.tensor([trajectory.ending is not Ending.DONE for trajectory in trajectories] or [False])
        network = self.value_network
        after = self._scored(rows, lambda part: values_after(network, self.policy, part, self.temperature))
        return critic.estimate(rows, after, self.objective.token_rewards(rows), truncated)

    def _weighted(self, rows: RolloutBatch) -> RolloutBatch:
        assert self.turn_weighting.factor is not None
        if is_sharded(self.policy):
            raise ConfigurationError("a weighting of turns reads the policy's output layer, which must not be sharded")
        signals = token_signals(self.policy, self.objective, self.teacher, rows, self.temperature, self.device)
        return rows.replace(factors=self.turn_weighting.factor(signals))

    def _logprobs(self, network: PolicyNetwork, rows: RolloutBatch) -> Tensor:
        return self._scored(
            rows, lambda part: network(part.input_ids, part.position_ids, part.generated, self.temperature)[0]
        )

    def _scored(self, rows: RolloutBatch, score: Callable[[RolloutBatch], Tensor]) -> Tensor:
        """A number for each token up to its row's last generated one, a few rows at a time, on the CPU."""
        scores: Tensor | None = None
        for index, part in parts(rows, self.policy, self.device):
            values = score(part)
            values = values.to("cpu", torch.promote_types(values.dtype, torch.float32))
            scores = values.new_zeros(rows.turn.shape) if scores is None else scores
            if len(index):
                scores[index, : values.shape[1]] = values
        assert scores is not None
        return scores


def spread(advantages: Tensor, rows: RolloutBatch) -> Tensor:
    """Give each generated token the advantage of its trajectory ([N]) or of its turn of it ([N, K])."""
    place = (rows.trajectory,) if advantages.ndim == 1 else (rows.trajectory, rows.turn.clamp(min=0))
    return torch.where(rows.generated, advantages[place], 0.0)
