from __future__ import annotations

import math
import random

import pytest
import torch
from batches import tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sorl_lightning.functional import losses, ratios, weights

LEVELS = ("token", "turn", "turn_sum", "sequence")


def gradient(scalar, at):
    return torch.autograd.grad(scalar, at, retain_graph=True)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "slope"),
    [
        (1.5, 1.0, -1.2, True, 0.0),
        (1.5, -1.0, 1.5, False, 1.0),
        (0.5, 1.0, -0.5, False, -1.0),
        (0.5, -1.0, 0.8, True, 0.0),
        (1.0, 2.0, -2.0, False, -2.0),
        (1.2, 1.0, -1.2, False, -1.0),
        (1.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_right_values_on_both_sides_of_the_clip(ratio, advantage, loss, clipped, slope):
    at = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    value, is_clipped = losses.clipped_surrogate(at, torch.tensor([[advantage]], dtype=torch.float64))
    assert value.item() == pytest.approx(loss)
    assert is_clipped.item() is clipped
    assert gradient(value.sum(), at).item() == slope


def test_epsilons_are_separate():
    ratio = torch.tensor([[1.25, 1.35, 0.75, 0.85]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, clipped = losses.clipped_surrogate(ratio, advantages, epsilon_low=0.2, epsilon_high=0.3)
    assert clipped.tolist() == [[False, True, True, False]]
    assert_close(loss, torch.tensor([[-1.25, -1.3, 0.8, 0.85]]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS), token_gradient=st.booleans())
def test_clipped_gradient_is_the_unclipped_one_less_the_bias(seed, level, token_gradient):
    batch = tokens_of(seed).one_row_each(garbage=math.nan)
    new = batch.new.clone().requires_grad_()
    ratio = ratios.importance_ratio(new, batch.old, batch.turn, level, token_gradient, batch.trajectory)
    loss, clipped = losses.clipped_surrogate(ratio, batch.advantages)
    weight = weights.trajectory_weights(batch.turn, batch.trajectory).double()
    bias = losses.clip_bias(ratio, batch.advantages, clipped)

    unclipped = gradient(losses.weighted_sum(ratio * batch.advantages, weight), new)
    clipping = gradient(losses.weighted_sum(bias, weight), new)
    assert_close(gradient(losses.weighted_sum(loss, weight), new), -(unclipped - clipping))
    assert (clipping.norm() > 0) <= bool(clipped.any())
    assert (bias[~clipped] == 0).all()


def test_the_bias_of_two_clipped_tokens_by_hand():
    new = torch.tensor([[0.5, -0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, -1.0, 3.0]], dtype=torch.float64)
    turn = torch.tensor([[0, 1, 2]])
    ratio = ratios.importance_ratio(new, torch.zeros_like(new), turn)
    _, clipped = losses.clipped_surrogate(ratio, advantages)
    bias = losses.clip_bias(ratio, advantages, clipped)
    expected = torch.tensor([[2 * math.exp(0.5), -math.exp(-0.5), 0.0]], dtype=torch.float64)
    assert_close(bias.detach(), expected)
    assert_close(gradient(bias.sum(), new), expected)


def test_nothing_is_clipped_on_policy():
    ratio = torch.ones(2, 4, requires_grad=True)
    advantages = torch.randn(2, 4)
    loss, clipped = losses.clipped_surrogate(ratio, advantages)
    assert not clipped.any()
    assert_close(gradient(loss.sum(), ratio), -advantages)
    assert_close(losses.clip_bias(ratio, advantages, clipped).detach(), torch.zeros(2, 4))


def test_a_clipped_token_with_an_exploding_ratio_has_no_gradient():
    new = torch.tensor([[1e4, 0.1]], requires_grad=True)
    ratio = ratios.importance_ratio(new, torch.zeros_like(new), torch.tensor([[0, 1]]), "turn_sum")
    loss, clipped = losses.clipped_surrogate(ratio, torch.ones(1, 2))
    assert_close(loss.detach(), torch.tensor([[-1.2, -math.exp(0.1)]]))
    assert clipped.tolist() == [[True, False]]
    assert_close(gradient(loss.sum(), new), torch.tensor([[0.0, -math.exp(0.1)]]))


@pytest.mark.parametrize(
    ("rule", "norm", "reference", "factor"),
    [
        ("max1", 4.0, None, 0.25),
        ("max1", 0.5, None, 1.0),
        ("literal", 4.0, None, 0.25),
        ("literal", 0.5, None, 2.0),
        ("literal", 1e-12, None, 1e8),
        ("plus1", 4.0, None, 0.2),
        ("plus1", 0.5, None, 1 / 1.5),
        ("relative", 4.0, 2.0, 0.5),
        ("relative", 1.0, 2.0, 1.0),
        ("relative", 4.0, None, 1.0),
        ("max1", math.inf, None, 0.0),
    ],
)
def test_factor_by_rule(rule, norm, reference, factor):
    assert losses.clip_factor(norm, rule, reference) == pytest.approx(factor)


@pytest.mark.parametrize("rule", ["max1", "literal", "plus1", "relative"])
def test_factor_is_one_without_clipping_and_a_nan_is_not_hidden(rule):
    assert losses.clip_factor(0.0, rule, 3.0) == 1.0
    assert math.isnan(losses.clip_factor(math.nan, rule, 3.0))


def test_weight_zero_removes_inf_and_nan_from_value_and_gradient():
    values = torch.tensor([[math.nan, 2.0, math.inf, 4.0]], requires_grad=True)
    total = losses.weighted_sum(values, torch.tensor([[0.0, 0.25, 0.0, 0.75]]))
    assert total.item() == 3.5
    assert gradient(total, values).tolist() == [[0, 0.25, 0, 0.75]]


def test_a_batch_of_padding_gives_zero_with_a_graph():
    parameter = torch.tensor(2.0, requires_grad=True)
    turn = torch.full((2, 3), -1)
    ratio = ratios.importance_ratio(parameter * torch.randn(2, 3), torch.zeros(2, 3), turn)
    loss, clipped = losses.clipped_surrogate(ratio, torch.zeros(2, 3))
    total = losses.weighted_sum(loss, weights.token_weights(turn))
    assert (total.item(), clipped.any().item(), gradient(total, parameter).item()) == (0.0, False, 0.0)


def test_a_masked_row_changes_nothing_about_a_normal_one():
    new = torch.tensor([[0.3, -0.1], [5.0, 7.0]], dtype=torch.float64)
    turn, alone = torch.tensor([[0, 1], [-1, -1]]), torch.tensor([[0, 1]])

    def loss_and_gradient(new, turn):
        new = new.clone().requires_grad_()
        ratio = ratios.importance_ratio(new, torch.zeros_like(new), turn)
        loss, _ = losses.clipped_surrogate(ratio, torch.full_like(new, -0.5))
        total = losses.weighted_sum(loss, weights.trajectory_weights(turn).double())
        return total.detach(), gradient(total, new)[:1]

    assert_close(loss_and_gradient(new, turn), loss_and_gradient(new[:1], alone))


def test_micro_batches_of_one_and_three_tokens_average_over_tokens():
    loss = torch.tensor([[4.0, 0, 0], [0.0, 0, 0]])
    weight = weights.token_weights(torch.tensor([[0, -1, -1], [0, 0, 0]]))
    total = sum(losses.weighted_sum(loss[i : i + 1], weight[i : i + 1]) for i in range(2))
    assert total.item() == 1.0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    level=st.sampled_from(LEVELS),
    kind=st.sampled_from(["token", "trajectory", "turn", "each_turn"]),
)
def test_any_partition_into_micro_batches_gives_the_same_gradient(seed, level, kind):
    tokens, rng = tokens_of(seed), random.Random(seed)
    batch = tokens.one_row_each() if level == "sequence" else tokens.one_row_per_turn()
    weight = {
        "token": weights.token_weights(batch.turn),
        "trajectory": weights.trajectory_weights(batch.turn, batch.trajectory),
        "turn": weights.turn_weights(batch.turn, batch.trajectory),
        "each_turn": weights.each_turn_weights(batch.turn, batch.trajectory),
    }[kind]

    def accumulated(parts):
        new = batch.new.clone().requires_grad_()
        for rows in parts:
            b = batch.rows(rows)
            ratio = ratios.importance_ratio(new[rows], b.old, b.turn, level, trajectory=b.trajectory)
            loss, _ = losses.clipped_surrogate(ratio, b.advantages)
            losses.weighted_sum(loss, weight[rows].double()).backward()
        return new.grad

    rows = rng.sample(range(len(batch.turn)), len(batch.turn))
    cuts = sorted(rng.choices(range(len(rows) + 1), k=2))
    parts = [part for part in (rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] :]) if part]
    assert_close(accumulated(parts), accumulated([rows]), atol=1e-12, rtol=0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS))
def test_a_trajectory_in_one_row_or_in_several_has_the_same_loss_and_gradient(seed, level):
    tokens = tokens_of(seed)

    def loss_and_gradient(batch):
        new = batch.new.clone().requires_grad_()
        ratio = ratios.importance_ratio(new, batch.old, batch.turn, level, trajectory=batch.trajectory)
        loss, _ = losses.clipped_surrogate(ratio, batch.advantages)
        total = losses.weighted_sum(loss, weights.trajectory_weights(batch.turn, batch.trajectory).double())
        return total.detach(), batch.in_order(gradient(total, new))

    assert_close(loss_and_gradient(tokens.one_row_per_turn()), loss_and_gradient(tokens.one_row_each()))
