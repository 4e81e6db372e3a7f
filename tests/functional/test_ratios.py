from __future__ import annotations

import math

import pytest
import torch
from batches import tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sorl_lightning.functional import ratios

LEVELS = ("token", "turn", "turn_sum", "sequence")
TURN = torch.tensor([[-1, 0, 0, -1, 1, -1]])
LOG_RATIO = torch.tensor([[0.0, 0.1, 0.3, 0.0, -0.2, 0.0]], dtype=torch.float64)


def ratio_of(log_ratio, turn, level, **options):
    return ratios.importance_ratio(log_ratio, torch.zeros_like(log_ratio), turn, level, **options)


@pytest.mark.parametrize(
    ("level", "first", "second", "third"),
    [
        ("token", 1.105171, 1.349859, 0.818731),
        ("turn", 1.221403, 1.221403, 0.818731),
        ("turn_sum", 1.491825, 1.491825, 0.818731),
        ("sequence", 1.068939, 1.068939, 1.068939),
    ],
)
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, -math.inf])
def test_right_values(level, first, second, third, garbage):
    polluted = torch.where(TURN >= 0, LOG_RATIO, garbage)
    expected = torch.tensor([[1, first, second, 1, third, 1]], dtype=torch.float64)
    for new, old in ((polluted, torch.zeros_like(polluted)), (LOG_RATIO, polluted - polluted)):
        assert_close(ratios.importance_ratio(new, old, TURN, level), expected, atol=1e-6, rtol=0)


def test_a_long_episode_collapses_only_as_a_sum():
    log_ratio, turn = torch.full((1, 1000), -0.00282, dtype=torch.float64), torch.zeros(1, 1000, dtype=torch.int64)
    assert ratio_of(log_ratio, turn, "sequence")[0, 0].item() == pytest.approx(0.997184, abs=1e-6)
    assert ratio_of(log_ratio, turn, "turn")[0, 0].item() == pytest.approx(0.997184, abs=1e-6)
    assert ratio_of(log_ratio, turn, "turn_sum")[0, 0].item() == pytest.approx(0.0596, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS))
def test_ratios_do_not_depend_on_padding_or_rows(seed, level):
    tokens = tokens_of(seed)

    def ratios_and_gradient(batch):
        new = batch.new.clone().requires_grad_()
        ratio = ratios.importance_ratio(new, batch.old, batch.turn, level, trajectory=batch.trajectory)
        assert (ratio[batch.turn < 0] == 1).all()
        ratio.square().sum().backward()
        assert (new.grad[batch.turn < 0] == 0).all()
        return batch.in_order(ratio.detach()), batch.in_order(new.grad)

    expected = ratios_and_gradient(tokens.one_row_each())
    assert_close(ratios_and_gradient(tokens.one_row_per_turn(garbage=math.nan, padding=2)), expected)
    assert_close(ratios_and_gradient(tokens.one_row(garbage=math.inf)), expected)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_one_turn_makes_turn_and_sequence_equal_and_one_token_turn_and_token(seed):
    one_turn = tokens_of(seed, most_turns=1).one_row_each()
    one_token = tokens_of(seed, longest_turn=1).one_row_each()

    def ratio(batch, level):
        return ratios.importance_ratio(batch.new, batch.old, batch.turn, level, trajectory=batch.trajectory)

    assert_close(ratio(one_turn, "sequence"), ratio(one_turn, "turn"))
    for level in ("turn", "turn_sum"):
        assert_close(ratio(one_token, level), ratio(one_token, "token"))


@pytest.mark.parametrize("level", ["turn", "sequence"])
@pytest.mark.parametrize("constant", [True, False])
def test_token_gradient_keeps_the_value_and_the_gradient_of_a_constant_advantage(level, constant):
    batch = tokens_of(3).one_row_each()
    advantages = torch.full_like(batch.new, 0.7) if constant else batch.new
    values, gradients = [], []
    for token_gradient in (False, True):
        new = batch.new.clone().requires_grad_()
        ratio = ratios.importance_ratio(new, batch.old, batch.turn, level, token_gradient, batch.trajectory)
        (ratio * advantages).sum().backward()
        values.append(ratio.detach())
        gradients.append(new.grad)
    assert_close(values[0], values[1])
    assert torch.allclose(gradients[0], gradients[1]) is constant


def test_on_policy_the_turn_ratio_gives_each_token_its_turns_mean_advantage():
    new = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[9.0, 1.0, 2.0, 9.0, -4.0, 9.0]], dtype=torch.float64)
    (ratio_of(new, TURN, "turn") * advantages).sum().backward()
    assert new.grad.tolist() == [[0, 1.5, 1.5, 0, -4, 0]]


@pytest.mark.parametrize("level", LEVELS)
def test_an_exploding_ratio_stays_finite_in_value_and_gradient(level):
    new = torch.full((1, 3), 500.0, requires_grad=True)
    ratio = ratio_of(new, torch.zeros(1, 3, dtype=torch.int64), level)
    ratio.sum().backward()
    assert (ratio > 1e30).all()
    assert ratio.isfinite().all()
    assert new.grad.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_of_padding_keeps_a_graph(level):
    new = torch.full((2, 3), math.nan, requires_grad=True)
    ratio = ratio_of(new, torch.full((2, 3), -1), level)
    assert ratio.tolist() == [[1, 1, 1], [1, 1, 1]]
    ratio.sum().backward()
    assert new.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


# The trainer's log-probability of each token less the engine's: turn A [0.1, 0.9], turn B [-0.2].
MISMATCH = torch.tensor([[0.0, 0.1, 0.9, 0.0, -0.2, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("level", "truncated", "masked"),
    [
        ("token", (1.105171, 1.5, 0.818731), (1.105171, 0.0, 0.818731)),
        ("turn", (1.5, 1.5, 0.818731), (0.0, 0.0, 0.818731)),
        ("sequence", (1.305605, 1.305605, 1.305605), (1.305605, 1.305605, 1.305605)),
    ],
)
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_right_values_of_mismatch_corrections(level, truncated, masked, garbage):
    trainer = torch.where(TURN >= 0, MISMATCH, garbage).requires_grad_()
    for kind, (first, second, third) in (("truncate", truncated), ("mask", masked)):
        factor = ratios.mismatch_correction(trainer, torch.zeros_like(MISMATCH), TURN, kind, level, threshold=1.5)
        assert_close(factor, torch.tensor([[1, first, second, 1, third, 1]]).double(), atol=1e-6, rtol=0)
        assert not factor.requires_grad


def test_a_sequence_beyond_the_threshold_is_masked_as_a_whole():
    factor = ratios.mismatch_correction(MISMATCH, torch.zeros_like(MISMATCH), TURN, "mask", "sequence", threshold=1.3)
    assert_close(factor, torch.tensor([[1.0, 0, 0, 1, 0, 1]]).double())


def test_an_engine_that_renormalises_over_what_it_kept_biases_the_ratio_by_the_mass():
    """Logits [2, 1, 0, -1], top-p 0.8 keeps two tokens of mass 0.880797."""
    logprobs = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(0)
    engine = logprobs[:2].log_softmax(0)
    new, old, turn = logprobs[:1][None], engine[:1][None], torch.tensor([[0]])
    assert ratios.importance_ratio(new, old, turn).item() == pytest.approx(0.880797, abs=1e-6)
    assert ratios.mismatch_correction(new, old, turn).item() == pytest.approx(0.880797, abs=1e-6)
    assert ratios.importance_ratio(new, new, turn).item() == 1.0  # to the trainer's own, the ratio is right


def test_a_threshold_that_would_hold_agreement_down_is_refused():
    with pytest.raises(ValueError, match="threshold"):
        ratios.mismatch_correction(MISMATCH, MISMATCH, TURN, threshold=0.5)
