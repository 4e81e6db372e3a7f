"""DAgger: the policy leads into its own states, the expert says what to do there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey, derive_seed
from sorl_lightning.rollout.engines.expert import ExpertEngine
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.types import Completion

# Log-probability, nats, of what the expert would never play: finite, as those of a trajectory must be.
NEVER = -1e4


class DAggerEngine(RolloutEngine):
    """Policy and expert take turns; ``Imitation(expert_turns_only=True)`` imitates only what the expert would do.

    So the policy learns what to do after its own mistakes, actions that the environment does not understand included.
    A turn carries the log-probability of the expert's choosing it: 0 for the expert's action, whoever played it, and
    ``NEVER`` for anything else.

    Args:
        policy_turns: probability, in [0, 1], that the policy plays a turn, seeded by the request.

    Source: Ross et al. 2011, arXiv:1011.0686, with a constant mixture.
    """

    def __init__(self, policy_turns: float = 0.5) -> None:
        if not 0 <= policy_turns <= 1:
            raise ConfigurationError(f"DAggerEngine.policy_turns must be in [0, 1], got {policy_turns}")
        self.policy_turns = policy_turns
        self._expert = ExpertEngine()
        self._policy = LocalEngine()

    def attach(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Both meet the policy."""
        self._expert.attach(policy, tokenizer)
        self._policy.attach(policy, tokenizer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The policy's own turns are played with ``weights``."""
        self._expert.load_weights((), version)
        self._policy.load_weights(weights, version)

    def open(self, trajectory: TrajectoryKey) -> None:
        """Wait for this trajectory in every round of the policy."""
        self._policy.open(trajectory)

    async def generate(self, request: GenerationRequest) -> Completion:
        """The policy's turn, or the expert's."""
        expert = await self._expert.generate(request)
        if random.Random(derive_seed(request.seed, "dagger")).random() < self.policy_turns:
            turn = await self._policy.generate(request)
            first = 0.0 if turn.token_ids == expert.token_ids else NEVER
            rest = [0.0] * (len(turn.token_ids) - 1)
            return dataclasses.replace(turn, logprobs=(first, *rest)) if turn.token_ids else turn
        return expert

    def release(self, trajectory: TrajectoryKey) -> None:
        """A trajectory has ended."""
        self._policy.release(trajectory)

    def close(self) -> None:
        """Drop the copy of the policy."""
        self._policy.close()
