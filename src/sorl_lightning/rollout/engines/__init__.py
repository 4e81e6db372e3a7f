"""Engines that generate in this process."""

from sorl_lightning.rollout.engines.expert import ExpertEngine
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.rollout.engines.random import RandomEngine

__all__ = ["ExpertEngine", "LocalEngine", "RandomEngine"]
