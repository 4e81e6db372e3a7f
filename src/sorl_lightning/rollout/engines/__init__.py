"""Engines: in this process, or over HTTP."""

from sorl_lightning.rollout.engines.dagger import DAggerEngine
from sorl_lightning.rollout.engines.expert import ExpertEngine
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.rollout.engines.random import RandomEngine
from sorl_lightning.rollout.engines.vllm import VLLMEngine

__all__ = ["DAggerEngine", "ExpertEngine", "LocalEngine", "RandomEngine", "VLLMEngine"]
