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
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.group, []).append(trajectory.reward)
    return mean([max(group) - min(group) <= 1e-8 * max(map(abs, group)) for group in rewards.values()])
