from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from sorl_lightning.functional.chunked_divergence import chunked_divergence
from sorl_lightning.functional.chunked_topk import chunked_topk, chunked_topk_divergence
from sorl_lightning.functional.divergences import divergence, topk_divergence, topk_entropy

KINDS = ("reverse_kl", "forward_kl", "jsd")


def models(tokens=7, vocabulary=11):
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, head = make(tokens, 4).requires_grad_(), make(vocabulary, 4).requires_grad_()
    return hidden, head, make(tokens, 3), make(vocabulary, 3)


def check_equal(found, expected, inputs):
    assert_close(found, expected)
    upstream = torch.linspace(-1, 2, len(found), dtype=torch.float64)
    for left, right in zip(*(torch.autograd.grad(v, inputs, upstream) for v in (found, expected)), strict=True):
        assert_close(left, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("temperature", "chunk_size"), [(1.0, 3), (0.7, 7), (2.0, 100)])
def test_value_and_gradients_are_those_of_whole_logits(kind, beta, temperature, chunk_size):
    hidden, head, teacher, teacher_head = models()
    found = chunked_divergence(hidden, head, teacher, teacher_head, kind, beta, temperature, chunk_size)
    expected = divergence(hidden @ head.T / temperature, teacher @ teacher_head.T / temperature, kind, beta)
    check_equal(found, expected, (hidden, head))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [True, False])
def test_top_k_likewise(kind, tail):
    hidden, head, teacher, teacher_head = models()
    top = (teacher @ teacher_head.T / 0.5).log_softmax(-1).topk(4)
    found = chunked_topk_divergence(hidden, head, top.indices, top.values, kind, tail, temperature=0.5, chunk_size=3)
    check_equal(found, topk_divergence(hidden @ head.T / 0.5, top.indices, top.values, kind, tail), (hidden, head))


@pytest.mark.parametrize("kind", KINDS)
def test_an_equal_teacher_gives_zero_and_no_gradient(kind):
    hidden, head, _, _ = models()
    found = chunked_divergence(hidden, head, hidden, head, kind)
    assert_close(found, torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
    for gradient in torch.autograd.grad(found.sum(), (hidden, head)):
        assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    hidden, head, teacher, teacher_head = models(tokens=0)
    found = chunked_divergence(hidden, head, teacher, teacher_head, kind)
    found.sum().backward()
    assert found.shape == (0,)
    assert not head.grad.any()


def test_the_top_k_of_a_model():
    hidden, head, _, _ = models()
    targets = torch.arange(7)
    ids, logprobs, sampled = chunked_topk(hidden, head, targets, 3, temperature=0.5, chunk_size=2)
    whole = (hidden @ head.T / 0.5).log_softmax(-1).detach()
    assert torch.equal(ids, whole.topk(3).indices)
    assert_close(logprobs, whole.topk(3).values)
    assert_close(sampled, whole[torch.arange(7), targets])
    assert chunked_topk(hidden, head, targets, 0)[0].shape == (7, 0)
    assert chunked_topk(hidden, head, targets, 99)[0].shape == (7, 11)


def test_entropy_of_the_top_k_is_a_lower_bound_that_all_tokens_reach():
    whole = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    assert_close(topk_entropy(whole), torch.tensor([1.2130075], dtype=torch.float64))
    assert topk_entropy(whole[:, :2]).item() == pytest.approx(1.0397208)  # .5, .25 and the rest, .25


@pytest.mark.parametrize(
    ("change", "message"),
    [({"temperature": 0.0}, "temperature"), ({"chunk_size": 0}, "chunk_size"), ({"kind": "kl"}, "kind"),
     ({"beta": 2.0}, "beta"), ({"teacher_head_weight": torch.zeros(5, 3, dtype=torch.float64)}, "vocabulary|dimension V")],
)  # fmt: skip
def test_what_cannot_work_is_refused(change, message):
    names = ("hidden", "head_weight", "teacher_hidden", "teacher_head_weight")
    with pytest.raises((ValueError, TypeError), match=message):  # TypeError by the shape checks of the test run
        chunked_divergence(**{**dict(zip(names, models(), strict=True)), **change})
