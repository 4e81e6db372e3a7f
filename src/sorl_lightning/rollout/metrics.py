"""Numbers about finished trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.stream_figures import StreamFigures
from sorl_lightning.types import Ending, Trajectory


class Share(NamedTuple):
    """A sum and the number of its terms."""

    total: float
    terms: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is logged of a collection; the shares of ranks add with ``+``.

    Attributes:
        shares: of each mean; over trajectories, or over groups.
        trajectories: their number.
        tokens: generated tokens.
        failures: groups dropped.
        discarded: groups played and not trained.
        dropped: trajectories dropped for a number that is none.
        seconds: wall-clock time of the slowest rank.
        turn_limit: the largest limit under which a trajectory was rolled out, turns.
        stream: what streaming did; None without.
        loop_pause: longest time that an event loop of any rank did not answer, seconds.
    """

    shares: Mapping[str, Share]
    trajectories: int
    tokens: int
    failures: int
    discarded: int
    dropped: int
    seconds: float
    turn_limit: int
    stream: StreamFigures | None = None
    loop_pause: float = 0.0

    def __add__(self, other: Summary) -> Summary:
        shares = dict(self.shares)
        for name, share in other.shares.items():
            mine = shares.get(name, Share(0.0, 0))
            shares[name] = Share(mine.total + share.total, mine.terms + share.terms)
        return Summary(
            shares=shares,
            trajectories=self.trajectories + other.trajectories,
            tokens=self.tokens + other.tokens,
            failures=self.failures + other.failures,
            discarded=self.discarded + other.discarded,
            dropped=self.dropped + other.dropped,
            seconds=max(self.seconds, other.seconds),
            turn_limit=max(self.turn_limit, other.turn_limit),
            stream=self.stream if other.stream is None else other.stream + (self.stream or StreamFigures()),
            loop_pause=max(self.loop_pause, other.loop_pause),
        )

    @property
    def means(self) -> dict[str, float]:
        """Mean of each share; 0 of nothing."""
        return {name: share.total / max(share.terms, 1) for name, share in self.shares.items()}


def summarize(collection: Collection) -> Summary:
    """The figures of this rank's share of a collection."""
    trajectories = collection.played
    return Summary(
        shares=trajectory_shares(trajectories),
        trajectories=len(trajectories),
        tokens=sum(trajectory.generated_tokens for trajectory in trajectories),
        failures=len(collection.failures),
        discarded=len({trajectory.group for trajectory in collection.discarded}),
        dropped=collection.dropped,
        seconds=collection.seconds,
        turn_limit=max((trajectory.turn_limit for trajectory in trajectories), default=0),
        stream=collection.stream,
        loop_pause=collection.loop_pause,
    )


def trajectory_shares(trajectories: Sequence[Trajectory]) -> dict[str, Share]:
    """Shares over trajectories.

    ``success`` (over n siblings a task its mean is Avg@n), ``return`` (reward), ``turns``, ``tokens`` (generated, a
    trajectory), ``ending/KIND``, ``environment/NAME`` (what the environment reported at the last step).
    """
    values: dict[str, list[float]] = {
        "success": [trajectory.success for trajectory in trajectories],
        "return": [trajectory.reward for trajectory in trajectories],
        "turns": [len(trajectory.turns) for trajectory in trajectories],
        "tokens": [trajectory.generated_tokens for trajectory in trajectories],
    }
    for ending in Ending:
        if ending is not Ending.ERROR:
            values[f"ending/{ending.value}"] = [trajectory.ending is ending for trajectory in trajectories]
    for name in sorted({name for trajectory in trajectories for name in trajectory.metrics}):
        reported = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        values[f"environment/{name}"] = reported
    return {name: Share(float(sum(numbers)), len(numbers)) for name, numbers in values.items()}


def constant_groups(trajectories: Sequence[Trajectory]) -> Share:
    """Groups whose siblings all have the same reward: no signal for a group baseline."""
    groups = {trajectory.group for trajectory in trajectories}
    return Share(float(len(constant_group_ids(trajectories))), len(groups))


def constant_group_ids(trajectories: Sequence[Trajectory]) -> list[int]:
    """The groups whose siblings all have the same reward (groups of one are), in order."""
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.group, []).append(trajectory.reward)
    return [number for number, group in rewards.items() if max(group) - min(group) <= 1e-8 * max(map(abs, group))]
