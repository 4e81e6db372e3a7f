"""What an objective is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from sorl_lightning.interfaces import Interface
from sorl_lightning.models import Readout
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
        """Advantage of each trajectory, float [N]."""
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
