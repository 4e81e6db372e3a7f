"""Rows hold every generated token once, and micro-batches every row once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.packing import balance, lengths, pack, padding_batch, select
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=40), st.integers(1, 8), st.booleans())
def test_every_row_lands_in_one_micro_batch(row_lengths: list[int], micro_batches: int, padded: bool) -> None:
    parts = balance(torch.tensor(row_lengths, dtype=torch.long), micro_batches, padded=padded)
    assert len(parts) == micro_batches
    assert sorted(torch.cat(parts).tolist()) == list(range(len(row_lengths)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 8))
def test_micro_batches_differ_by_a_row_at_most(row_lengths: list[int], count: int) -> None:
    sizes = [sum(row_lengths[row] for row in part.tolist()) for part in balance(torch.tensor(row_lengths), count)]
    assert max(sizes) - min(sizes) <= max(row_lengths)
    assert max(sizes) <= sum(row_lengths) / count + max(row_lengths) * (1 - 1 / count)


def test_micro_batches_hold_about_as_many_tokens_or_as_much_with_padding() -> None:
    row_lengths = torch.tensor([10, 1, 1, 1, 10, 1])
    assert [sorted(part.tolist()) for part in balance(row_lengths, 2)] == [[0, 1, 3], [2, 4, 5]]
    assert [sorted(part.tolist()) for part in balance(row_lengths, 2, padded=True)] == [[0, 4], [1, 2, 3, 5]]


@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_do_not_fit_the_budget_are_refused_before_training(padded: bool) -> None:
    balance(torch.tensor([10, 10, 10, 10]), 2, token_budget=20, padded=padded)
    with pytest.raises(ConfigurationError, match=r"token_budget=19 .* 4 rows over micro_batches=2 need 20"):
        balance(torch.tensor([10, 10, 10, 10]), 2, token_budget=19, padded=padded)


def test_a_budget_counts_padding_where_a_model_computes_it() -> None:
    balance(torch.tensor([10, 2]), 1, token_budget=12)
    with pytest.raises(ConfigurationError, match=r"need 20"):
        balance(torch.tensor([10, 2]), 1, token_budget=12, padded=True)


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
