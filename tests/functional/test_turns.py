from __future__ import annotations

import math

import pytest
import torch
from batches import tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sorl_lightning.functional import turns

TURN = torch.tensor([[-1, 0, 0, -1, 1, -1, 0]])
TRAJECTORY = torch.tensor([[7, 7, 7, 7, 7, 9, 9]])
VALUES = torch.tensor([[math.nan, 1.0, 3.0, math.inf, 8.0, -math.inf, 5.0]])


def test_segments_of_the_worked_example():
    by_turn = turns.segments(TURN, TRAJECTORY, "turn")
    by_trajectory = turns.segments(TURN, TRAJECTORY, "trajectory")
    assert (by_turn.index.tolist(), by_turn.count) == ([0, 0, 1, 2], 3)
    assert (by_trajectory.index.tolist(), by_trajectory.count) == ([0, 0, 0, 1], 2)


@pytest.mark.parametrize(
    ("span", "reduction", "expected"),
    [
        ("turn", "mean", [0.0, 2, 2, 0, 8, 0, 5]),
        ("turn", "sum", [0.0, 4, 4, 0, 8, 0, 5]),
        ("trajectory", "mean", [0.0, 4, 4, 0, 4, 0, 5]),
        ("trajectory", "sum", [0.0, 12, 12, 0, 12, 0, 5]),
    ],
)
def test_pooled_reads_generated_tokens_only(span, reduction, expected):
    assert turns.pooled(VALUES, TURN, TRAJECTORY, span, reduction).tolist() == [expected]


def test_pooled_gradient_is_finite_beside_nan():
    values = VALUES.clone().requires_grad_()
    (turns.pooled(values, TURN, TRAJECTORY) * torch.arange(7.0)).sum().backward()
    assert values.grad.tolist() == [[0, 1.5, 1.5, 0, 4, 0, 6]]


def test_without_trajectories_a_row_is_one():
    turn = torch.tensor([[0, 0], [0, 1]])
    assert turns.pooled(torch.tensor([[1.0, 3.0], [5.0, 6.0]]), turn).tolist() == [[2, 2], [5, 6]]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), span=st.sampled_from(["turn", "trajectory"]))
def test_pools_do_not_depend_on_the_layout(seed, span):
    tokens = tokens_of(seed)
    layouts = [
        tokens.one_row_each(),
        tokens.one_row_per_turn(garbage=math.nan),
        tokens.one_row(garbage=math.inf, padding=3),
    ]
    pools = [b.in_order(turns.pooled(b.new, b.turn, b.trajectory, span)) for b in layouts]
    assert_close(pools[1], pools[0])
    assert_close(pools[2], pools[0])


def test_statistics_count_trajectories_tokens_and_last_turns():
    success = torch.tensor([[False, True, True, True, True, False, False]])
    counts = turns.turn_statistics(TURN, TRAJECTORY, divergence=VALUES, success=success, depth=3)
    assert counts.trajectories.tolist() == [2, 1, 0]
    assert counts.tokens.tolist() == [3, 1, 0]
    assert counts.divergence_sum.tolist() == [9, 8, 0]
    assert counts.success_last_turns.tolist() == [0, 1, 0]
    assert counts.all_last_turns.tolist() == [1, 1, 0]


def test_a_turn_without_a_generated_token_does_not_count():
    counts = turns.turn_statistics(torch.tensor([[0, -1, 2, 2]]))
    assert counts.trajectories.tolist() == [1, 0, 1]
    assert counts.all_last_turns.tolist() == [0, 0, 1]


def test_statistics_of_a_batch_of_padding_are_empty():
    assert turns.turn_statistics(torch.full((2, 3), -1)).tokens.tolist() == []
    assert turns.turn_statistics(torch.full((2, 3), -1), depth=2).all_last_turns.tolist() == [0, 0]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_statistics_add_up_over_micro_batches(seed):
    batch = tokens_of(seed).one_row_each(garbage=math.nan)

    def counted(b):
        return turns.turn_statistics(b.turn, b.trajectory, b.new, b.advantages > 0)

    half = len(batch.turn) // 2
    whole = counted(batch)
    parts = counted(batch.rows(list(range(half)))) + counted(batch.rows(list(range(half, len(batch.turn)))))
    for field in ("trajectories", "tokens", "divergence_sum", "success_last_turns", "all_last_turns"):
        assert_close(getattr(parts, field), getattr(whole, field))


def test_a_turn_beyond_the_depth_is_refused():
    with pytest.raises(ValueError, match="depth must be at least 2, got 1"):
        turns.turn_statistics(TURN, TRAJECTORY, depth=1)
