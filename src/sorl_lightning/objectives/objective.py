"""What the module asks of a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from sorl_lightning.interfaces import Interface
from sorl_lightning.networks import Readout
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory

Metrics = Mapping[str, Tensor]


class Objective(Interface):
    """A loss on generated tokens."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether ``reference_logprobs`` must be filled in."""
        ...

    @abstractmethod
    def check(self, group_size: int) -> None:
        """Refuse settings that cannot work with so many siblings a task."""
        ...

    @abstractmethod
    def advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Advantage of each trajectory, float [N], or of each turn of each trajectory, float [N, K].

        A rank may have none.
        """
        ...

    @abstractmethod
    def terms(
        self, batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, weights: Tensor
    ) -> tuple[LossTerms, Metrics]:
        """Loss terms under ``weights``, and numbers to log: a value for each token, [B, T]."""
        ...


class TeacherObjective(Objective):
    """An objective that compares student and teacher; the batch that its ``terms`` see has a ``comparison``."""

    @property
    @abstractmethod
    def recorded_top_k(self) -> int | None:
        """K of the teacher's scores, taken when rows are collected; None: the whole distribution, in training."""
        ...

    @abstractmethod
    def tempered(self, temperature: float) -> float:
        """Temperature of both models in the divergence, where rollouts are sampled at ``temperature``."""
        ...

    @abstractmethod
    def compare(
        self, batch: RolloutBatch, teacher: Readout | None, temperature: float
    ) -> Callable[[Readout, Tensor], Tensor]:
        """What makes, of the student's readout and log-probabilities, its divergence at the N generated tokens.

        Args:
            teacher: its readout at the same tokens; None where its scores were recorded in ``batch``.
            temperature: of the rollouts.

        Returns:
            a function from the readout and [N] log-probabilities to [N] divergences, nats, with the student's graph.
        """
        ...


@runtime_checkable
class HasOldPolicy(Protocol):
    """An objective that says which policy its ratios are taken to, and what it needs of a trajectory's rows."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether ``old_logprobs`` must be filled in: the trainer's own, at the start of the collection."""
        ...

    @property
    def pools_trajectories(self) -> bool:
        """Whether all rows of a trajectory must be in one micro-batch."""
        ...


@runtime_checkable
class HasHeldOutFigures(Protocol):
    """An objective whose loss says something of held-out rollouts too, which have no advantages."""

    def held_out(self, batch: RolloutBatch, logprobs: Tensor) -> Metrics:
        """Numbers to log: a value for each token, [B, T]. The batch has a ``comparison`` if there is a teacher."""
        ...


@runtime_checkable
class HasCriticRewards(Protocol):
    """An objective that can leave its advantages to a critic."""

    @property
    def needs_critic(self) -> bool:
        """Whether it does."""
        ...

    def token_rewards(self, rows: RolloutBatch) -> Tensor:
        """Reward at each token, float [B, T], from which the critic makes advantages and returns."""
        ...
