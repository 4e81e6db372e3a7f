"""Chance plays: the floor that a policy is measured against."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from sorl_lightning.errors import ConfigurationError, RolloutError
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.engines.actions import ActionEngine
from sorl_lightning.rollout.environment import HasAdmissibleActions


class RandomEngine(ActionEngine):
    """Answers every request with one of the environment's admissible actions, uniformly, seeded by the request."""

    def choose(self, request: GenerationRequest) -> tuple[str, float]:
        """One of n actions, with log-probability -log n."""
        actions = admissible_actions(self, request)
        return random.Random(request.seed).choice(actions), -math.log(len(actions))


def admissible_actions(engine: ActionEngine, request: GenerationRequest) -> Sequence[str]:
    """What the episode's environment would understand now, at least one action.

    Raises:
        ConfigurationError: the environment cannot tell.
        RolloutError: there is none.
    """
    name = type(request.environment).__name__
    if not isinstance(request.environment, HasAdmissibleActions):
        raise ConfigurationError(
            f"{type(engine).__name__} needs an environment with admissible_actions, and {name} has none"
        )
    actions = request.environment.admissible_actions()
    if not actions:
        raise RolloutError(f"{name} has no admissible action in a state that is not over")
    return actions
