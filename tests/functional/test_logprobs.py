from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from sorl_lightning.functional import logprobs, ratios


def plain(hidden, head_weight, targets, temperature=1.0):
    logits = hidden @ head_weight.T
    distribution = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    head_weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, head_weight, torch.randint(11, (7,), generator=generator)


@pytest.mark.parametrize(("temperature", "logprob"), [(1.0, -0.440190), (0.5, -0.145078)])
def test_temperature(temperature, logprob):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    found, entropy = logprobs.token_logprobs(logits, torch.eye(4), torch.tensor([0]), temperature)
    p = (logits[0] / temperature).softmax(0)
    assert found.item() == pytest.approx(logprob, abs=1e-6)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)


def test_a_ratio_needs_the_same_temperature_on_both_sides():
    logits, turn = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0]])

    def at(temperature):
        return logprobs.token_logprobs(logits, torch.eye(4), torch.tensor([0]), temperature)[0][None]

    assert ratios.importance_ratio(at(0.5), at(0.5), turn).item() == 1.0
    assert ratios.importance_ratio(at(1.0), at(0.5), turn).item() == pytest.approx(0.744448, abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_plain_version(inputs, chunk_size, temperature):
    hidden, head_weight, targets = inputs
    scale = torch.linspace(-1, 2, 7, dtype=torch.float64)

    def outcome(outputs):
        loss = (outputs[0] * scale).sum() + (outputs[1] * scale.flip(0)).sum()
        return *(output.detach() for output in outputs), *torch.autograd.grad(loss, (hidden, head_weight))

    chunked = outcome(logprobs.token_logprobs(hidden, head_weight, targets, temperature, chunk_size))
    assert_close(chunked, outcome(plain(hidden, head_weight, targets, temperature)))


@pytest.mark.parametrize("used", [0, 1])
def test_each_output_alone_has_its_own_gradient(inputs, used):
    hidden, head_weight, _ = inputs
    chunked = torch.autograd.grad(logprobs.token_logprobs(*inputs, 0.7, 3)[used].sum(), (hidden, head_weight))
    assert_close(chunked, torch.autograd.grad(plain(*inputs, 0.7)[used].sum(), (hidden, head_weight)))


def test_finite_differences(inputs):
    hidden, head_weight, targets = inputs
    assert torch.autograd.gradcheck(lambda h, w: logprobs.token_logprobs(h, w, targets, 0.7, 3), (hidden, head_weight))


def test_a_second_backward_gives_the_same_gradients(inputs):
    hidden, head_weight, _ = inputs
    loss = sum(output.sum() for output in logprobs.token_logprobs(*inputs, chunk_size=3))
    first = torch.autograd.grad(loss, (hidden, head_weight), retain_graph=True)
    assert_close(torch.autograd.grad(loss, (hidden, head_weight)), first)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient(inputs, frozen):
    parts = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(inputs[:2])]
    logprobs.token_logprobs(*parts, inputs[2], chunk_size=3)[0].sum().backward()
    assert parts[frozen].grad is None
    (expected,) = torch.autograd.grad(plain(*inputs)[0].sum(), inputs[1 - frozen])
    assert_close(parts[1 - frozen].grad, expected)


def test_no_tokens_keep_a_graph():
    hidden, head_weight = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    found, entropy = logprobs.token_logprobs(hidden, head_weight, torch.zeros(0, dtype=torch.int64))
    assert found.tolist() == entropy.tolist() == []
    (found.sum() + entropy.sum()).backward()
    assert head_weight.grad.tolist() == [[0, 0, 0]] * 5
    assert hidden.grad.shape == (0, 3)


def test_large_logits_stay_finite():
    hidden = torch.tensor([[200.0, -200.0]], requires_grad=True)
    found, entropy = logprobs.token_logprobs(hidden, torch.eye(2), torch.tensor([1]))
    (found + entropy).sum().backward()
    assert (found.item(), entropy.item()) == (-400, 0)
    assert hidden.grad.tolist() == [[-1, 1]]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_operation_returns_a_tensor_of_tokens_by_vocabulary():
    hidden, head_weight = torch.randn(64, 2, requires_grad=True), torch.randn(100, 2, requires_grad=True)
    with LargestTensor() as largest:
        found, entropy = logprobs.token_logprobs(hidden, head_weight, torch.zeros(64, dtype=torch.int64), chunk_size=8)
        (found + entropy).sum().backward()
    assert largest.elements == 8 * 100


def test_half_precision_takes_its_softmax_in_single():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 8, generator=generator).bfloat16().requires_grad_()
    head_weight = torch.randn(20, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.arange(6)
    found, entropy = logprobs.token_logprobs(hidden, head_weight, targets, chunk_size=4)
    expected = plain(hidden.float(), head_weight.float(), targets)
    assert found.dtype == entropy.dtype == torch.float32
    assert_close((found, entropy), expected, atol=0.03, rtol=0.02)
    gradients = torch.autograd.grad((found + entropy).sum(), (hidden, head_weight))
    exact = torch.autograd.grad((expected[0] + expected[1]).sum(), (hidden, head_weight))
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 2
    assert_close([g.float() for g in gradients], [g.float() for g in exact], atol=0.05, rtol=0.05)


def test_autocast_gives_the_logits_of_the_plain_version():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(6, 8, generator=generator, requires_grad=True)
    head_weight = torch.randn(20, 8, generator=generator, requires_grad=True)
    targets = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logprobs.token_logprobs(hidden, head_weight, targets, chunk_size=4)
        expected = plain(hidden, head_weight, targets)
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(found[0].sum(), (hidden, head_weight))
    assert [g.dtype for g in gradients] == [torch.float32] * 2
    assert_close(gradients, torch.autograd.grad(expected[0].sum(), (hidden, head_weight)), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_must_be_positive(inputs, temperature):
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        logprobs.token_logprobs(*inputs, temperature)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        logprobs.token_logprobs(*inputs, chunk_size=0)
