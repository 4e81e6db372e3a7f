"""Rows hold every generated token once, and micro-batches every row once."""

from __future__ import annotations

import torch

from sorl_lightning.rollout.packing import lengths, pack, padding_batch, select
from sorl_lightning.types import Completion, Ending, RolloutBatch, Task, Trajectory, Turn


def turn(index: int, prompt: list[int], generated: list[int], reward: float = 0.0) -> Turn:
    completion = Completion(
        token_ids=tuple(generated),
        logprobs=tuple(-0.1 * token for token in generated),
        finish_reason="stop",
        policy_version=(7,) * len(generated),
    )
    silent = {"text": "", "observation": None, "seconds": 0.0}
    return Turn(index=index, prompt_ids=tuple(prompt), completion=completion, reward=reward, **silent)


def trajectory(*turns: Turn) -> Trajectory:
    ended = {
        "reward": sum(turn.reward for turn in turns),
        "success": True,
        "ending": Ending.DONE,
        "turn_limit": 9,
        "seed": 0,
    }
    return Trajectory(task=Task(id="t"), group=0, sibling=0, turns=turns, **ended)


def test_the_worked_example_of_types() -> None:
    rows = pack([trajectory(turn(0, [1, 7, 8], [20, 2], 0.5), turn(1, [1, 7, 8, 20, 2, 9, 9], [21, 2], 1.0))])
    assert rows.input_ids.tolist() == [[1, 7, 8, 20, 2, 9, 9, 21, 2]]
    assert rows.turn.tolist() == [[-1, -1, -1, 0, 0, -1, -1, 1, 1]]
    assert rows.policy_version.tolist() == [[-1, -1, -1, 7, 7, -1, -1, 7, 7]]
    assert rows.rewards.tolist() == [[0, 0, 0, 0, 0.5, 0, 0, 0, 1.0]]
    torch.testing.assert_close(rows.behaviour_logprobs[0, [3, 4, 7, 8]], torch.tensor([-2.0, -0.2, -2.1, -0.2]))


def test_a_rewritten_history_starts_a_new_row_and_trains_each_token_once() -> None:
    # The template dropped the first turn's thoughts (20) from the second prompt.
    rows = pack([trajectory(turn(0, [1, 7], [20, 21, 2]), turn(1, [1, 7, 21, 2, 9], [22, 2]))])
    assert rows.input_ids.tolist() == [[1, 7, 20, 21, 2, 0, 0], [1, 7, 21, 2, 9, 22, 2]]
    assert rows.turn.tolist() == [[-1, -1, 0, 0, 0, -1, -1], [-1, -1, -1, -1, -1, 1, 1]]
    assert rows.trajectory[rows.generated].tolist() == [0] * 5


def test_an_empty_completion_trains_nothing() -> None:
    rows = pack([trajectory(turn(0, [1, 7], [], 1.0))])
    assert not rows.generated.any()
    assert not rows.rewards.any()


def test_context_after_the_last_generated_token_is_cut() -> None:
    rows = pack([trajectory(turn(0, [1], [5])), trajectory(turn(0, [1, 2, 3, 4], [5, 6]))])
    assert lengths(rows).tolist() == [2, 6]
    assert select(rows, torch.tensor([0])).input_ids.tolist() == [[1, 5]]
    assert select(rows, torch.tensor([], dtype=torch.long)).turn.tolist() == padding_batch().turn.tolist()


def test_rows_are_the_same_whatever_the_default_type() -> None:
    def packed() -> RolloutBatch:
        return pack([trajectory(turn(0, [1, 7], [20, 2], 0.5))])

    single = packed()
    torch.set_default_dtype(torch.float64)
    try:
        double = packed()
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("behaviour_logprobs", "rewards"):
        assert getattr(double, name).dtype == getattr(single, name).dtype == torch.float32
        assert torch.equal(getattr(double, name), getattr(single, name))
