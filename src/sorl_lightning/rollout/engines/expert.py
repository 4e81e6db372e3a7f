"""The expert plays: demonstrations for imitation, and the ceiling that a policy is measured against."""

from __future__ import annotations

import math
import random

from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.engines.actions import ActionEngine
from sorl_lightning.rollout.engines.random import admissible_actions
from sorl_lightning.rollout.environment import expert_of


class ExpertEngine(ActionEngine):
    """Answers requests with the environment's ``expert_action``, or now and then with a random admissible action.

    A state for which the expert has no action ends the run with ``RolloutError``.

    Args:
        mistakes: probability, in [0, 1], that a turn is a uniformly random admissible action instead, seeded by the
            request. A demonstrator who errs also shows the way back from errors.
    """

    def __init__(self, mistakes: float = 0.0) -> None:
        if not 0 <= mistakes <= 1:
            raise ConfigurationError(f"ExpertEngine.mistakes must be in [0, 1], got {mistakes}")
        super().__init__()
        self.mistakes = mistakes

    def choose(self, request: GenerationRequest) -> tuple[str, float]:
        """The action, and the log-probability of choosing it either way."""
        environment = expert_of(request.environment)
        try:
            expert = environment.expert_action()
        except LookupError as error:
            raise RolloutError(f"the expert has no action in trajectory {request.trajectory}: {error}") from error
        if self.mistakes == 0:
            return expert, 0.0
        actions = admissible_actions(self, request)
        generator = random.Random(request.seed)
        action = generator.choice(actions) if generator.random() < self.mistakes else expert
        return action, math.log((1 - self.mistakes) * (action == expert) + self.mistakes / len(actions))
