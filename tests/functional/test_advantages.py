from __future__ import annotations

import math

import pytest
import torch
from batches import tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sorl_lightning.functional import advantages


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_standard_deviation_is_unbiased():
    result = advantages.group_advantages(doubles(1, 0, 0, 1), torch.zeros(4, dtype=torch.int64))
    assert_close(result, doubles(1, -1, -1, 1) * 0.8660239, atol=1e-6, rtol=0)


def test_without_scale_rewards_are_only_centred():
    result = advantages.group_advantages(doubles(3, 1, 2, 0), torch.tensor([5, 5, 5, 5]), scale="none")
    assert_close(result, doubles(1.5, -0.5, 0.5, -1.5))


def test_groups_are_separate_and_need_not_be_adjacent():
    result = advantages.group_advantages(doubles(1, 10, 0, 10, 0, 10, 1), torch.tensor([4, -2, 4, -2, 4, -2, 4]))
    assert_close(result, doubles(0.8660239, 0, -0.8660239, 0, -0.8660239, 0, 0.8660239), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1 + 1e-9],
        [0.37, 0.37, 0.37],
        [-5e6, -5e6 * (1 + 1e-9)],
        [0.0, 0.0],
        [0.1 + 0.2, 0.3, 0.3],
        [0.25],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_group_and_a_group_of_one_give_exactly_zero(rewards, dtype):
    rewards, groups = torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64)
    for result in (
        advantages.group_advantages(rewards, groups),
        advantages.group_advantages(rewards, groups, scale="none"),
        advantages.leave_one_out(rewards, groups),
    ):
        assert result.tolist() == [0.0] * len(rewards)


def test_a_small_but_real_spread_counts():
    result = advantages.group_advantages(doubles(1, 1 + 1e-4), torch.zeros(2, dtype=torch.int64))
    assert_close(result, doubles(-1, 1) * 0.5e-4 / (1e-4 / math.sqrt(2) + 1e-6))


def test_a_nan_reward_stays_in_its_group():
    result = advantages.group_advantages(doubles(1, 0, math.nan, 1), torch.tensor([0, 0, 1, 1]))
    assert result[:2].isfinite().all()
    assert result[2:].isnan().all()


def test_leave_one_out_subtracts_the_mean_of_the_others():
    result = advantages.leave_one_out(doubles(1, 0, 0, 1, 5), torch.tensor([0, 0, 0, 0, 1]))
    assert_close(result, doubles(1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 0))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=12))
def test_advantages_sum_to_zero_in_each_group(pairs):
    rewards, groups = doubles(*(r for r, _ in pairs)), torch.tensor([g for _, g in pairs])
    for result in (advantages.group_advantages(rewards, groups), advantages.leave_one_out(rewards, groups)):
        for group in groups.unique():
            assert result[groups == group].sum().item() == pytest.approx(0, abs=1e-6)


def test_no_rewards_give_no_advantages():
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert advantages.group_advantages(*nothing).tolist() == advantages.leave_one_out(*nothing).tolist() == []


TURN = torch.tensor([[-1, 0, 0, -1, 1, -1], [0, -1, -1, 1, 1, 1]])
NAN = math.nan
REWARDS = torch.tensor([[NAN, 0, 0, NAN, 1, NAN], [0.5, NAN, NAN, 0, 0, 0]], dtype=torch.float64)
VALUES = torch.tensor([[NAN, 0.1, 0.2, NAN, 0.3, NAN], [0.4, NAN, NAN, 0.3, 0.2, 0.1]], dtype=torch.float64)


def gae_by_definition(rewards, values, turn, bootstrap, gamma, lam):
    """One token at a time, last to first."""
    result, targets = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(len(turn)):
        following, running = bootstrap[b].item(), 0.0
        for t in reversed([t for t in range(turn.shape[1]) if turn[b, t] >= 0]):
            delta = rewards[b, t].item() + gamma * following - values[b, t].item()
            running = delta + gamma * lam * running
            following = values[b, t].item()
            result[b, t], targets[b, t] = running, running + following
    return result, targets


def test_gae_steps_over_context_and_bootstraps_truncated_trajectories():
    result, returns = advantages.gae(REWARDS, VALUES, TURN, doubles(0, 2), gamma=0.9, lam=0.8)
    last, second = 1 - 0.3, 0.9 * 0.3 - 0.2
    middle = second + 0.72 * last
    first = 0.9 * 0.2 - 0.1 + 0.72 * middle
    assert_close(result[0], doubles(0, first, middle, 0, last, 0))
    assert_close(returns[0], doubles(0, first + 0.1, middle + 0.2, 0, 1, 0))
    assert result[1, 5].item() == pytest.approx(0.9 * 2 - 0.1)


def test_with_gamma_and_lambda_one_the_return_is_the_reward_to_come():
    result, returns = advantages.gae(REWARDS, VALUES, TURN, doubles(0, 2))
    assert_close(returns, doubles(0, 1, 1, 0, 1, 0, 2.5, 0, 0, 2, 2, 2).reshape(2, 6))
    assert_close(result[0], doubles(0, 0.9, 0.8, 0, 0.7, 0))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_recursion(seed, gamma, lam):
    batch = tokens_of(seed).one_row_each(garbage=math.nan, padding=seed % 3)
    bootstrap = torch.linspace(-1, 1, len(batch.turn), dtype=torch.float64)
    expected = gae_by_definition(batch.advantages, batch.new, batch.turn, bootstrap, gamma, lam)
    assert_close(advantages.gae(batch.advantages, batch.new, batch.turn, bootstrap, gamma, lam), expected)


def test_gae_carries_no_gradient_and_takes_a_row_of_padding():
    values = torch.ones(1, 3, requires_grad=True)
    result, returns = advantages.gae(torch.ones(1, 3), values, torch.full((1, 3), -1), torch.zeros(1))
    assert not result.requires_grad
    assert result.tolist() == returns.tolist() == [[0, 0, 0]]


def test_whitening_reads_generated_tokens_only():
    turn = torch.tensor([[0, -1, 0], [1, -1, -1]])
    result = advantages.whiten(torch.tensor([[1.0, math.nan, 2.0], [3.0, math.inf, 9.0]]), turn)
    assert_close(result, torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]))
    assert advantages.whiten(torch.tensor([[3.0]]), torch.tensor([[0]])).tolist() == [[0]]
