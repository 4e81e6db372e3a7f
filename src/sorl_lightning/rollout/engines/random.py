"""Chance plays: the floor that a policy is measured against."""

from __future__ import annotations

import math
import random

from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.engines.actions import ActionEngine
from sorl_lightning.rollout.environment import HasAdmissibleActions


class RandomEngine(ActionEngine):
    """Answers every request with one of the environment's admissible actions, uniformly, seeded by the request."""

    def choose(self, request: GenerationRequest) -> tuple[str, float]:
        """One of n actions, with log-probability -log n."""
        name = type(request.environment).__name__
        if not isinstance(request.environment, HasAdmissibleActions):
            raise ConfigurationError(f"RandomEngine needs an environment with admissible_actions, and {name} has none")
        actions = request.environment.admissible_actions()
        if not actions:
            raise RolloutError(f"{name} has no admissible action in a state that is not over")
        return random.Random(request.seed).choice(actions), -math.log(len(actions))
