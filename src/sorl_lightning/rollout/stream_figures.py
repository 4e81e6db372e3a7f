"""What streaming did to a collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """Figures of one rank's share of a collection; those of ranks add with ``+``.

    Attributes:
        trajectories: trained, of whose oldest tokens the staleness is taken.
        staleness_sum: of that staleness, collections; staleness_max: the largest.
        waited: seconds that training waited for the collection.
        stalled: of these, seconds in which enough groups had finished, but one that was due had not.
        carried: groups still in the making, which later collections train.
        outstanding: groups that have started and are not trained: those, and those that have finished.
        restarted: groups that were begun anew, because the engine was lost or the run was resumed.
    """

    trajectories: int = 0
    staleness_sum: float = 0.0
    staleness_max: int = 0
    waited: float = 0.0
    stalled: float = 0.0
    carried: int = 0
    outstanding: int = 0
    restarted: int = 0

    def __add__(self, other: StreamFigures) -> StreamFigures:
        return StreamFigures(
            trajectories=self.trajectories + other.trajectories,
            staleness_sum=self.staleness_sum + other.staleness_sum,
            staleness_max=max(self.staleness_max, other.staleness_max),
            waited=max(self.waited, other.waited),
            stalled=max(self.stalled, other.stalled),
            carried=self.carried + other.carried,
            outstanding=self.outstanding + other.outstanding,
            restarted=self.restarted + other.restarted,
        )

    @property
    def metrics(self) -> Mapping[str, float]:
        """Names and values for the log."""
        return {
            "staleness": self.staleness_sum / max(self.trajectories, 1),
            "staleness_max": float(self.staleness_max),
            "wait_seconds": self.waited,
            "stall_seconds": self.stalled,
            "stalls": float(self.stalled > 0),
            "carried_groups": float(self.carried),
            "outstanding_groups": float(self.outstanding),
            "restarted_groups": float(self.restarted),
        }
