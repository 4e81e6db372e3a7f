from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from sorl_lightning.functional import divergences

TEACHER = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
STUDENT = torch.tensor([0.7, 0.25, 0.05], dtype=torch.float64).log()
KINDS = ("reverse_kl", "forward_kl", "jsd")


def random_pair(seed, size=6, rows=3):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, size, generator=generator, dtype=torch.float64) * 2
    return student, (torch.randn(rows, size, generator=generator, dtype=torch.float64) * 2).log_softmax(-1)


@pytest.mark.parametrize(
    ("kind", "beta", "value"),
    [
        ("reverse_kl", 0.5, 0.0276677),
        ("forward_kl", 0.5, 0.0315208),
        ("jsd", 0.5, 0.007310),
        ("jsd", 0.0, 0.0315208),
        ("jsd", 1.0, 0.0276677),
    ],
)
def test_right_values(kind, beta, value):
    result = divergences.divergence(STUDENT + 3, TEACHER - 2, kind, beta)  # logits need not be normalised
    assert result.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "tail", "value"),
    [
        ("reverse_kl", False, 0.0623251),
        ("forward_kl", False, -0.0377939),
        ("reverse_kl", True, 0.0276677),
        ("forward_kl", True, 0.0315208),
        ("jsd", True, 0.007310),
    ],
)
def test_right_values_of_the_top_two(kind, tail, value):
    result = divergences.topk_divergence(STUDENT, torch.tensor([0, 1]), TEACHER[:2], kind, tail)
    assert result.item() == pytest.approx(value, abs=1e-6)


def test_jsd_near_its_ends_tends_to_the_kls():
    for beta, kind, scale in ((1e-6, "forward_kl", 1e-6), (1 - 1e-6, "reverse_kl", 1e-6)):
        limit = divergences.divergence(STUDENT, TEACHER, "jsd", beta) / scale
        assert limit.item() == pytest.approx(divergences.divergence(STUDENT, TEACHER, kind).item(), rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), tail=st.booleans())
def test_the_whole_vocabulary_as_top_k_is_the_full_divergence(seed, kind, tail):
    student, teacher = random_pair(seed)
    ids = torch.stack([torch.randperm(6) for _ in range(3)])
    full = divergences.divergence(student, teacher, kind)
    assert_close(divergences.topk_divergence(student, ids, teacher.gather(-1, ids), kind, tail), full)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS), k=st.integers(1, 6))
def test_with_the_tail_it_is_between_zero_and_the_full_divergence(seed, kind, k):
    student, teacher = random_pair(seed)
    top = teacher.topk(k)
    result = divergences.topk_divergence(student, top.indices, top.values, kind)
    assert (result > -1e-12).all()
    assert (result < divergences.divergence(student, teacher, kind) + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "rounding"), [(1.0, 1e-6), (30.0, 1e-5)])
def test_an_equal_teacher_gives_zero_and_no_gradient(kind, scale, rounding):
    logits = (torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    teacher = logits.detach().log_softmax(-1)
    top = teacher.topk(3)
    for result in (
        divergences.divergence(logits, teacher, kind),
        divergences.topk_divergence(logits, top.indices, top.values, kind),
    ):
        assert_close(result.detach(), torch.zeros(4), atol=rounding, rtol=0)
        (grad,) = torch.autograd.grad(result.sum(), logits)
        assert_close(grad, torch.zeros(4, 9), atol=rounding, rtol=0)


def test_without_the_tail_the_gradient_at_an_equal_teacher_is_not_zero():
    logits = STUDENT.clone().requires_grad_()
    divergences.topk_divergence(logits, torch.tensor([0, 1]), STUDENT[:2], tail=False).backward()
    assert logits.grad.abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [True, False])
def test_gradients_by_finite_differences(kind, tail):
    student, teacher = random_pair(5)
    student.requires_grad_()
    top = teacher.topk(3)
    assert torch.autograd.gradcheck(lambda s: divergences.divergence(s, teacher, kind, 0.3), student)
    assert torch.autograd.gradcheck(
        lambda s: divergences.topk_divergence(s, top.indices, top.values, kind, tail, 0.3), student
    )


def test_leaving_the_support_costs_with_the_tail_and_pays_without():
    ids = torch.tensor([0, 1])

    def loss(mass, tail):
        student = torch.tensor([0.6 * mass, 0.3 * mass, 1 - 0.9 * mass], dtype=torch.float64).log()
        return divergences.topk_divergence(student, ids, TEACHER[:2], "reverse_kl", tail).item()

    assert loss(0.9, tail=True) > loss(1.0, tail=True)
    assert loss(0.6, tail=True) > loss(0.9, tail=True)
    assert loss(0.9, tail=False) < loss(1.0, tail=False)


def test_padding_among_the_top_k_is_left_out():
    padded = divergences.topk_divergence(
        STUDENT, torch.tensor([0, 1, 2]), torch.tensor([*TEACHER[:2], -math.inf], dtype=torch.float64)
    )
    assert padded.item() == pytest.approx(0.0276677, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_both_models_exclude_add_nothing(kind):
    student = torch.tensor([1.0, 0.5, -math.inf], requires_grad=True)
    teacher = torch.tensor([0.2, 0.9, -math.inf])
    result = divergences.divergence(student, teacher, kind)
    expected = divergences.divergence(student[:2], teacher[:2], kind)
    assert_close(result, expected)
    result.backward()
    assert student.grad.isfinite().all()


def test_half_precision_is_computed_in_single():
    result = divergences.divergence(STUDENT.bfloat16(), TEACHER.bfloat16())
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(0.0277, abs=2e-3)


def test_a_vocabulary_is_cut_before_the_softmax_not_after():
    student, teacher = torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 0, 0, 5])
    for kind in KINDS:
        assert divergences.divergence(student, teacher[:3], kind).item() == pytest.approx(0, abs=1e-7)
    mine, theirs = student.log_softmax(-1), teacher.log_softmax(-1)[:3]  # what it would be after the softmax
    assert (theirs.exp() * (theirs - mine)).sum().item() == pytest.approx(-0.107221, abs=1e-6)
    assert (mine.exp() * (mine - theirs)).sum().item() == pytest.approx(3.479852, abs=1e-5)


def by_enumeration(estimator, detach=False):
    """Mean of the estimator over the student's own distribution (.5, .5) and its derivative in the first logit."""
    logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
    student = torch.stack([logit, torch.zeros_like(logit)]).log_softmax(0)
    teacher = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    values = divergences.sampled_divergence(student, teacher, estimator)
    probabilities = student.exp().detach()
    as_loss = (probabilities * values).sum()
    if detach:  # policy gradient: the estimate is a reward, its gradient comes through log p
        as_loss = (probabilities * values.detach() * student).sum()
    (slope,) = torch.autograd.grad(as_loss, logit)
    return (probabilities * values).sum().item(), slope.item()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.510826, 0.0), ("k2", 0.733946, -0.549306), ("k3", 0.510826, -0.4)],
)
def test_estimators_by_enumeration(estimator, value, slope):
    assert by_enumeration(estimator) == (pytest.approx(value, abs=1e-6), pytest.approx(slope, abs=1e-6))


def test_k1_as_a_detached_reward_has_the_true_gradient():
    assert by_enumeration("k1", detach=True)[1] == pytest.approx(-0.549306, abs=1e-6)
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    true = divergences.divergence(logits, torch.tensor([0.9, 0.1], dtype=torch.float64).log())
    assert true.item() == pytest.approx(0.510826, abs=1e-6)
    assert torch.autograd.grad(true, logits)[0][0].item() == pytest.approx(-0.549306, abs=1e-6)


def test_k3_is_never_negative_and_survives_a_far_teacher():
    student = torch.tensor([-1.0, -200.0, -1.0, -0.5])
    result = divergences.sampled_divergence(student, torch.tensor([-300.0, -1.0, -1.0, -0.7]), "k3")
    assert_close(result, torch.tensor([math.exp(-20) + 19, math.exp(20) - 21, 0, math.exp(-0.2) - 0.8]))
