from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from batches import tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sorl_lightning.functional import losses, turns, weights

KINDS = {
    "trajectory": weights.trajectory_weights,
    "turn": weights.turn_weights,
    "each_turn": weights.each_turn_weights,
    "token": lambda turn, trajectory: weights.token_weights(turn),
    "pool": lambda turn, trajectory: weights.turn_weights(turn, trajectory, 2, 0.5, "pool"),
}


def one_token_turns(*lengths):
    """One row per trajectory, of one token per turn."""
    width = max(lengths)
    return torch.tensor([[t if t < length else -1 for t in range(width)] for length in lengths])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(sorted(KINDS)))
def test_weights_sum_to_one_and_do_not_depend_on_the_layout(seed, kind):
    tokens = tokens_of(seed)
    layouts = [tokens.one_row_each(), tokens.one_row_per_turn(padding=2), tokens.one_row()]
    found = [KINDS[kind](batch.turn, batch.trajectory) for batch in layouts]
    assert found[0].sum().item() == pytest.approx(1, abs=1e-6)
    for batch, weight in zip(layouts, found, strict=True):
        assert (weight[batch.turn < 0] == 0).all()
        assert_close(batch.in_order(weight), layouts[0].in_order(found[0]))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_batch_of_padding_weighs_nothing(kind):
    turn = torch.full((2, 3), -1)
    assert KINDS[kind](turn, turn).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_trajectory_weights_by_hand():
    turn = torch.tensor([[-1, 0, 0, 1], [0, -1, -1, -1], [-1, -1, -1, -1]])
    assert_close(weights.trajectory_weights(turn), torch.tensor([[0, 1, 1, 1], [3.0, 0, 0, 0], [0, 0, 0, 0]]) / 6)
    split = weights.trajectory_weights(turn, torch.tensor([[5, 5, 5, 5], [5, 0, 0, 0], [1, 2, 3, 4]]))
    assert_close(split, torch.tensor([[0, 1, 1, 1], [1.0, 0, 0, 0], [0, 0, 0, 0]]) / 4)


def test_the_token_mean_is_not_the_turn_mean():
    turn = torch.tensor([[0] + [1] * 9])
    divergence = torch.tensor([[1.0] + [0.1] * 9])
    for kind, expected in (("token", 0.19), ("each_turn", 0.55), ("turn", 0.55), ("trajectory", 0.19)):
        assert losses.weighted_sum(divergence, KINDS[kind](turn, None)).item() == pytest.approx(expected)


def test_turns_of_equal_length_weigh_the_same_by_token_and_by_turn():
    turn = torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1]])
    assert_close(weights.each_turn_weights(turn), weights.token_weights(turn))


def test_fixed_weights_divide_by_the_longest_trajectory_allowed():
    turn = torch.tensor([[0, 0, -1], [0, -1, -1]])
    assert_close(weights.fixed_weights(turn, 10), torch.tensor([[1, 1, 0], [1, 0, 0]]) / 20)


def test_deepest_third_weighs_a_third_under_turn_weights():
    turn = one_token_turns(*[9] * 27, *[1 + i % 6 for i in range(73)])
    deepest = turn >= 6
    assert weights.trajectory_weights(turn)[deepest].sum().item() == pytest.approx(0.090)
    assert weights.turn_weights(turn)[deepest].sum().item() == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("deep", "total", "valid"),
    [(7, 20, False), (8, 20, True), (14, 100, False), (15, 100, True), (20, 140, False), (21, 140, True)],
)
def test_a_turn_needs_eight_trajectories_and_fifteen_percent(deep, total, valid):
    turn = one_token_turns(*[2] * deep, *[1] * (total - deep))
    assert weights.valid_turns(turns.turn_statistics(turn)).tolist() == [True, valid]
    share = weights.turn_weights(turn)[turn == 1].sum().item()
    assert share == pytest.approx(0.5 if valid else 0.0)


def test_rounding_does_not_raise_the_threshold():
    turn = one_token_turns(*[2] * 7, *[1] * 93)  # .07 * 100 is 7.000000000000001
    assert weights.valid_turns(turns.turn_statistics(turn), 1, 0.07).tolist() == [True, True]


def test_tail_is_dropped_or_pooled():
    turn = one_token_turns(*[4] * 2, *[3] * 1, *[2] * 8)
    dropped, pooled = weights.turn_weights(turn), weights.turn_weights(turn, tail="pool")
    assert [round(dropped[turn == t].sum().item(), 6) for t in range(4)] == [0.5, 0.5, 0, 0]
    assert [round(pooled[turn == t].sum().item(), 6) for t in range(4)] == [0.333333, 0.333333, 0.2, 0.133333]
    assert_close(pooled[turn >= 2], torch.full((5,), 1 / 15))


def test_pool_without_a_tail_is_drop():
    turn = one_token_turns(*[2] * 8)
    assert_close(weights.turn_weights(turn, tail="pool"), weights.turn_weights(turn))


def test_in_a_small_batch_a_turn_needs_as_many_trajectories_as_the_first():
    turn = one_token_turns(3, 2, 2)
    assert_close(weights.turn_weights(turn), torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0]]) / 6)


def test_without_a_valid_turn_trajectories_count_equally():
    turn = torch.tensor([[t if t == b else -1 for t in range(9)] for b in range(9)])  # nine turns, one trajectory each
    assert_close(weights.turn_weights(turn), weights.trajectory_weights(turn))
    shares = [
        weights.turn_weights(turn[rows], counts=turns.turn_statistics(turn)) for rows in (slice(0, 4), slice(4, 9))
    ]
    assert_close(torch.cat(shares), weights.trajectory_weights(turn))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), tail=st.sampled_from(["drop", "pool"]), least=st.integers(1, 4))
def test_shares_of_a_batch_weigh_as_the_whole_does(seed, tail, least):
    batch = tokens_of(seed).one_row_each()
    half = len(batch.turn) // 2
    parts = batch.rows(list(range(half))), batch.rows(list(range(half, len(batch.turn))))
    counts = turns.turn_statistics(parts[0].turn) + turns.turn_statistics(parts[1].turn)

    def weigh(b, counts):
        return weights.turn_weights(b.turn, b.trajectory, least, 0.4, tail, counts)

    assert_close(torch.cat([weigh(part, counts) for part in parts]), weigh(batch, None))


def test_counts_without_last_turns_still_tell_the_number_of_trajectories():
    turn = one_token_turns(*[2] * 9)
    counts = dataclasses.replace(turns.turn_statistics(turn), all_last_turns=torch.zeros(2))
    assert_close(weights.turn_weights(turn, counts=counts), weights.turn_weights(turn))


def test_counts_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="counts must cover"):
        weights.turn_weights(one_token_turns(3, 3), counts=turns.turn_statistics(one_token_turns(2, 2)))


def test_blend_is_one_or_the_other_at_its_ends():
    turn = one_token_turns(*[2] * 8, *[1] * 8)
    ends = weights.trajectory_weights(turn), weights.turn_weights(turn)
    assert torch.equal(weights.blend(*ends, 0.0), ends[0])
    assert torch.equal(weights.blend(*ends, 1.0), ends[1])
    assert_close(weights.blend(*ends, 0.25), 0.75 * ends[0] + 0.25 * ends[1])
    assert weights.blend(*ends, 0.3).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_blend_refuses_anything_but_a_share(alpha):
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
        weights.blend(torch.ones(1, 1), torch.ones(1, 1), alpha)
