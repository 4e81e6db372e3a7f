"""What a collection brings home."""

from __future__ import annotations

from dataclasses import dataclass

from sorl_lightning import ranks
from sorl_lightning.errors import RolloutError
from sorl_lightning.rollout.stream_figures import StreamFigures
from sorl_lightning.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What one collection brought home.

    Attributes:
        index: 0-based number of the collection.
        trajectories: of whole groups only, ordered by group and sibling.
        failures: a sentence for each group that was dropped because its environment kept failing.
        dropped: trajectories dropped because a reward, log-probability or advantage was not finite.
        policy_version: version of the weights at its start.
        seconds: wall-clock time.
        discarded: trajectories of groups without signal, whose place others have taken.
        stream: what streaming did to it; None without.
        loop_pause: longest time that the event loop did not answer since the collection before, seconds.
    """

    index: int
    trajectories: tuple[Trajectory, ...]
    failures: tuple[str, ...] = ()
    dropped: int = 0
    policy_version: int = 0
    seconds: float = 0.0
    discarded: tuple[Trajectory, ...] = ()
    stream: StreamFigures | None = None
    loop_pause: float = 0.0

    @property
    def played(self) -> tuple[Trajectory, ...]:
        """All that was rolled out, trained or not: what figures about the policy are taken of."""
        return self.trajectories + self.discarded

    @property
    def sound(self) -> tuple[Trajectory, ...]:
        """Those that can be trained on, as the rows' ``trajectory`` numbers them."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.is_finite)

    def to(self, *_: object, **__: object) -> Collection:
        """Itself: nothing here lives on a device, and Lightning asks."""
        return self


def refuse_empty(collection: Collection, groups: int) -> None:
    """Refuse a collection without a trajectory on any rank.

    Args:
        collection: this rank's share.
        groups: that were played, on all ranks.

    Raises:
        RolloutError: as said, with the first failure.
    """
    if not ranks.anywhere(bool(collection.trajectories)):
        failures = [failure for failures in ranks.gather(collection.failures[:1]) for failure in failures]
        raise RolloutError(f"all {groups} groups of collection {collection.index} failed; the first: {failures[0]}")
