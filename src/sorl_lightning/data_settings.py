"""What the settings of a datamodule may be; each refusal is a sentence that names them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import lightning as L

from sorl_lightning.combinations import check_old_policy
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.chat import ChatFormat
from sorl_lightning.rollout.collector import Reward
from sorl_lightning.rollout.engine import RolloutEngine
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.rollout.gate import check_streaming
from sorl_lightning.strategies import check_strategy
from sorl_lightning.streams import Aggregation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out tasks are rolled out: always to full depth, with the same seeds every time.

    Args:
        n: siblings a task; success is then Avg@n.
        temperature: sampling temperature.
        max_tasks: the first so many tasks of the split; None takes all.
        engine: plays instead of the policy: an expert, random actions.
    """

    n: int = 1
    temperature: float = 1.0
    max_tasks: int | None = None
    engine: RolloutEngine | None = None


class Settings(Protocol):
    """Settings of RolloutDataModule, which describes them."""

    environment: Environment
    engine: RolloutEngine
    tasks_per_collection: int
    group_size: int
    max_turns: int
    max_tokens: int
    context_limit: int | None
    temperature: float
    mini_batches: int
    passes: int
    micro_batches: int
    token_budget: int | None
    aggregation: Aggregation
    max_staleness: int
    resample: int
    retries: int
    step_timeout: float | None
    reward: Reward | None
    chat: ChatFormat
    validation: Evaluation
    seed: int


def check_settings(settings: Settings) -> None:
    """Refuse what cannot work in any run.

    Raises:
        ConfigurationError: as said.
    """
    positive = ("tasks_per_collection", "group_size", "max_turns", "max_tokens", "context_limit", "token_budget")
    for name in (*positive, "mini_batches", "passes", "micro_batches"):
        if getattr(settings, name) is not None and getattr(settings, name) < 1:
            raise ConfigurationError(f"data.{name} must be at least 1, got {getattr(settings, name)}")
    if not 0 < settings.temperature < math.inf:
        raise ConfigurationError(f"data.temperature must be above 0, to train, and finite, got {settings.temperature}")
    for name in ("retries", "resample", "max_staleness"):
        if getattr(settings, name) < 0:
            raise ConfigurationError(f"data.{name} must be 0 or more, got {getattr(settings, name)}")
    if settings.step_timeout is not None and not settings.step_timeout > 0:
        raise ConfigurationError(f"data.step_timeout must be above 0 seconds, got {settings.step_timeout}")
    if settings.aggregation not in get_args(Aggregation):
        raise ConfigurationError(
            f"data.aggregation must be one of {get_args(Aggregation)}, got {settings.aggregation!r}"
        )
    _check_evaluation(settings.validation)


def _check_evaluation(validation: Evaluation) -> None:
    if validation.n < 1:
        raise ConfigurationError(f"data.validation.n must be at least 1, got {validation.n}")
    if not 0 <= validation.temperature < math.inf:
        raise ConfigurationError(
            f"data.validation.temperature must be 0 or more and finite, got {validation.temperature}"
        )
    if validation.max_tasks is not None and validation.max_tasks < 1:
        raise ConfigurationError(f"data.validation.max_tasks must be at least 1, got {validation.max_tasks}")


def check_fit(settings: Settings, trainer: L.Trainer) -> None:
    """Refuse what cannot be trained on by this trainer and its module.

    Raises:
        ConfigurationError: as said.
    """
    check_strategy(trainer.strategy)
    module: Any = trainer.lightning_module  # whose policy is not loaded yet, so it is no Learner so far
    if module.temperature != settings.temperature:
        raise ConfigurationError(
            f"model.temperature={module.temperature} must equal data.temperature={settings.temperature}, or "
            "the importance ratios compare two different distributions"
        )
    if trainer.accumulate_grad_batches != settings.micro_batches:
        raise ConfigurationError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must equal "
            f"data.micro_batches={settings.micro_batches}"
        )
    if settings.resample and settings.group_size < 2:
        raise ConfigurationError(
            f"data.resample={settings.resample} replaces groups whose siblings have one reward, which every group of "
            "data.group_size=1 is: set resample to 0 or group_size to 2 or more"
        )
    _check_shares(settings, trainer.world_size)
    if settings.max_staleness:
        _check_streaming(settings, module.objective)


def _check_shares(settings: Settings, world: int) -> None:
    """Every rank collects as many tasks, and has a trajectory for every mini-batch."""
    if settings.tasks_per_collection % world:
        raise ConfigurationError(
            f"data.tasks_per_collection={settings.tasks_per_collection} must be a multiple of the {world} ranks"
        )
    trajectories = settings.tasks_per_collection // world * settings.group_size
    if trajectories < settings.mini_batches:
        raise ConfigurationError(
            f"data.mini_batches={settings.mini_batches} is more than the trajectories of a collection on a rank, "
            f"{trajectories}"
        )


def _check_streaming(settings: Settings, objective: Any) -> None:
    check_streaming(settings.engine)
    if settings.resample:
        raise ConfigurationError(
            f"data.resample={settings.resample} replaces groups of a collection that has been rolled out whole, and "
            f"data.max_staleness={settings.max_staleness} makes collections of what finishes next: set one of them to 0"
        )
    check_old_policy(objective, settings.max_staleness)
