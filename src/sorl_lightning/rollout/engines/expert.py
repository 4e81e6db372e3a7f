"""The expert plays: gold transcripts for imitation, and the ceiling that a policy is measured against."""

from __future__ import annotations

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.engines.actions import ActionEngine
from sorl_lightning.rollout.environment import HasExpert


class ExpertEngine(ActionEngine):
    """Answers every request with the environment's ``expert_action``, with log-probability 0.

    A state for which the expert has no action raises ``LookupError``.
    """

    def choose(self, request: GenerationRequest) -> tuple[str, float]:
        """The expert's action."""
        if not isinstance(request.environment, HasExpert):
            name = type(request.environment).__name__
            raise ConfigurationError(f"ExpertEngine needs an environment with expert_action, and {name} has none")
        return request.environment.expert_action(), 0.0
