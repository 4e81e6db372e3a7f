"""Advantages of finished trajectories, by kind; groups without signal."""

from __future__ import annotations

import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.metrics import constant_group_ids
from sorl_lightning.types import Completion, Ending, Task, Trajectory, Turn

SILENT = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", policy_version=(0,))


def trajectory(group: int, *rewards: float, saw: tuple[str, ...] = (), outcome: float | None = None) -> Trajectory:
    """One turn a reward; ``saw`` are the observations that follow."""
    turns = tuple(
        Turn(index=k, prompt_ids=(1,), completion=SILENT, text="", reward=reward, seconds=0.0,
             observation=saw[k] if k < len(saw) else None)
        for k, reward in enumerate(rewards)
    )  # fmt: skip
    return Trajectory(
        task=Task(id="t"), group=group, sibling=0, turns=turns, reward=sum(rewards) if outcome is None else outcome,
        success=False, ending=Ending.DONE, turn_limit=9, seed=0,
    )  # fmt: skip


def advantages(kind: str, *trajectories: Trajectory, **settings) -> torch.Tensor:
    return PolicyGradient(advantage=kind, **settings).advantages(trajectories)


def outcomes(*rewards: float, group: int = 0) -> list[Trajectory]:
    return [trajectory(group, reward) for reward in rewards]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo_no_std", [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("reinforce++", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("reinforce++_baseline", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("turn_return", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("reward", [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_right_values_of_one_group(kind, expected) -> None:
    got = advantages(kind, *outcomes(1.0, 0.0, 0.0, 1.0))
    torch.testing.assert_close(got.reshape(-1), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo", "reinforce++_baseline", "turn_return", "gigpo"])
def test_constant_groups_and_groups_of_one_are_zero(kind) -> None:
    mixed = [*outcomes(0.7, 0.7, 0.7 + 1e-9), *outcomes(5.0, group=1), *outcomes(0.0, 1.0, group=2)]
    got = advantages(kind, *mixed).reshape(6)
    assert not got[:4].any()
    assert (got[4:] != 0).all()


def test_reinforce_compares_all_groups_and_its_baseline_variant_each_with_its_own() -> None:
    mixed = [*outcomes(1.0, 1.0), *outcomes(0.0, 2.0, group=1)]
    assert advantages("reinforce++", *mixed)[:2].tolist() == [0.0, 0.0]  # the mean of all is 1
    whitened = advantages("reinforce++_baseline", *mixed)
    assert whitened[:2].tolist() == [0.0, 0.0]
    assert float(whitened[3]) == pytest.approx(1 / (2 / 3) ** 0.5, abs=1e-4)


def test_returns_to_go_are_discounted_by_the_turn() -> None:
    first, second = trajectory(0, 0.0, 1.0), trajectory(0, 1.0)
    got = advantages("turn_return", first, second, turn_discount=0.5)
    returns = torch.tensor([0.5, 1.0, 1.0])
    expected = (returns - returns.mean()) / (returns.std() + 1e-6)
    torch.testing.assert_close(got[[0, 0, 1], [0, 1, 0]], expected)
    assert float(got[1, 1]) == 0.0  # never played


def test_a_replaced_outcome_is_on_the_last_turn() -> None:
    assert trajectory(0, 1.0, 2.0, outcome=10.0).turn_rewards == (1.0, 9.0)


def test_gigpo_compares_turns_that_had_read_the_same() -> None:
    both = [trajectory(0, 0.0, 0.0, saw=("hall",)), trajectory(0, 0.0, 1.0, saw=("hall",))]
    apart = [trajectory(0, 0.0, 0.0, saw=("hall",)), trajectory(0, 0.0, 1.0, saw=("cellar",))]
    episode = advantages("grpo", *both)
    step = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(
        advantages("gigpo", *both), episode[:, None] + torch.tensor([[-step, -step], [step, step]])
    )
    torch.testing.assert_close(
        advantages("gigpo", *apart), episode[:, None] + torch.tensor([[-step, 0.0], [step, 0.0]])
    )


@pytest.mark.parametrize("kind", ["grpo", "rloo", "gigpo", "turn_return", "reinforce++_baseline"])
def test_siblings_are_needed(kind) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.group_size must be at least 2, got 1"):
        PolicyGradient(advantage=kind).check(1)
    PolicyGradient(advantage="reinforce++").check(1)


def resampled(fit, rounds: int) -> RolloutDataModule:
    """Tasks of one turn have a constant reward here, those of two turns do not."""

    def reward(trajectory: Trajectory) -> float:
        return float(trajectory.sibling) if len(trajectory.turns) > 1 else 0.5

    data = RolloutDataModule(
        Countdown([1, 1, 1, 2, 2, 2]), ScriptedEngine(), tasks_per_collection=6, group_size=2, max_turns=2,
        max_tokens=4, context_limit=128, reward=reward, resample=rounds,
    )  # fmt: skip
    fit(agent(), data)
    return data


def test_groups_without_signal_are_replaced_within_a_bound(fit) -> None:
    assert len(constant_group_ids(resampled(fit, 0).collection.trajectories)) == 3
    collection = resampled(fit, 8).collection
    assert constant_group_ids(collection.trajectories) == []
    assert sorted({t.group for t in collection.trajectories}) == list(range(6))
    assert [(t.group, t.sibling) for t in collection.trajectories] == [(g, s) for g in range(6) for s in range(2)]
    assert {t.group for t in collection.discarded}.isdisjoint(range(6))
    assert len(constant_group_ids(collection.discarded)) * 2 == len(collection.discarded) >= 6


def test_resampling_is_the_same_in_every_run(fit) -> None:
    first, second = (resampled(fit, 2).collection for _ in range(2))
    assert [t.seed for t in first.played] == [t.seed for t in second.played]


def test_resampling_needs_groups(fit) -> None:
    data = RolloutDataModule(Countdown(), ScriptedEngine(), tasks_per_collection=2, group_size=1, resample=1)
    with pytest.raises(ConfigurationError, match=r"data\.resample=1 replaces groups"):
        fit(agent(objective=PolicyGradient(advantage="reward")), data)
