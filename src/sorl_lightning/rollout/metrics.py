"""Numbers about finished trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_lightning.types import Ending, Trajectory


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over trajectories.

    ``success`` (share; over n siblings a task this is Avg@n), ``return`` (reward), ``turns``, ``tokens`` (generated, a
    trajectory), ``ending/KIND`` (shares), ``environment/NAME`` (what the environment reported at the last step).
    """
    metrics = {
        "success": mean([trajectory.success for trajectory in trajectories]),
        "return": mean([trajectory.reward for trajectory in trajectories]),
        "turns": mean([len(trajectory.turns) for trajectory in trajectories]),
        "tokens": mean([trajectory.generated_tokens for trajectory in trajectories]),
    }
    for ending in Ending:
        if ending is not Ending.ERROR:
            metrics[f"ending/{ending.value}"] = mean([trajectory.ending is ending for trajectory in trajectories])
    for name in sorted({name for trajectory in trajectories for name in trajectory.metrics}):
        reported = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        metrics[f"environment/{name}"] = mean(reported)
    return metrics


def constant_groups(trajectories: Sequence[Trajectory]) -> float:
    """Share of groups whose siblings all have the same reward: no signal for a group baseline."""
    groups = {trajectory.group for trajectory in trajectories}
    return len(constant_group_ids(trajectories)) / len(groups) if groups else 0.0


def constant_group_ids(trajectories: Sequence[Trajectory]) -> list[int]:
    """The groups whose siblings all have the same reward (groups of one are), in order."""
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.group, []).append(trajectory.reward)
    return [number for number, group in rewards.items() if max(group) - min(group) <= 1e-8 * max(map(abs, group))]
