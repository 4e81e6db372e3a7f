"""Log-probability and entropy of tokens, from hidden states, without a [tokens, vocabulary] tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from sorl_lightning.functional.checks import Number, check_count, check_positive


def token_logprobs(
    hidden: Float[Tensor, "N D"],
    head_weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "N"],
    temperature: Number = 1.0,
    chunk_size: int = 256,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Log-probability of each target, and entropy of the distribution it comes from.

        p = softmax(head_weight h / temperature),    logprob = log p(target),    entropy = -sum_v p_v log p_v

    Never holds an [N, V] tensor: logits live for ``chunk_size`` tokens at a time, and the backward pass computes them
    again. Both outputs have a gradient, to ``hidden`` and to ``head_weight``, once (no second derivatives).

    Args:
        hidden: last hidden state at the position that predicts each target; N may be 0.
        head_weight: weight of the output layer.
        targets: token ids.
        temperature: sampling temperature; the behaviour log-probabilities must have been taken at the same.
        chunk_size: tokens whose logits exist together.

    Returns:
        log-probabilities and entropies, nats, in float32 at least. Logits are computed in autocast's dtype, else in the
        wider of the two arguments'.

    Raises:
        ValueError: a ``temperature`` that is not positive, a ``chunk_size`` below 1 or shapes that do not fit.
    """
    check_positive("temperature", temperature)
    check_count("chunk_size", chunk_size)
    if hidden.shape[1:] != head_weight.shape[1:] or hidden.shape[:1] != targets.shape:
        raise ValueError(
            "shapes must be hidden [N, D], head_weight [V, D] and targets [N], got "
            f"hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)}, targets {tuple(targets.shape)}"
        )
    dtype = logit_dtype(hidden, head_weight)
    return _TokenLogprobs.apply(hidden.to(dtype), head_weight.to(dtype), targets.long(), temperature, chunk_size)


def logit_dtype(hidden: Tensor, head_weight: Tensor) -> torch.dtype:
    """What logits are computed in: autocast's dtype, else the wider of the two arguments'."""
    dtype = torch.promote_types(hidden.dtype, head_weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return dtype


class _TokenLogprobs(torch.autograd.Function):
    """Two passes over chunks of tokens; the head's gradient is accumulated in place."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: Number, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        chunks = LogitChunks(hidden, head_weight, temperature, chunk_size)
        logprobs, entropy, normaliser = hidden.new_empty(3, len(hidden), dtype=chunks.precision)
        scratch = chunks.buffer()
        for part, logits in chunks:
            largest = logits.amax(1, keepdim=True)
            logits.sub_(largest)
            probabilities = torch.exp(logits, out=scratch[: len(logits)])
            total = probabilities.sum(1)
            log_total = total.log()
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - log_total
            entropy[part] = log_total - probabilities.mul_(logits).sum(1) / total
            normaliser[part] = largest[:, 0] + log_total
        ctx.save_for_backward(hidden, head_weight, targets, entropy, normaliser)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets, entropy, normaliser = ctx.saved_tensors
        chunks = LogitChunks(hidden, head_weight, ctx.temperature, ctx.chunk_size)
        scratch = None if grad_entropy is None else chunks.buffer()
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / ctx.temperature
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head_weight, dtype=chunks.precision) if needs_head else None
        for part, logits in chunks:
            at_target = grad_logprobs[part, None]
            log_p = logits.sub_(normaliser[part, None])
            if scratch is None or grad_entropy is None:
                grad = log_p.exp_().mul_(-at_target)
            else:
                p = torch.exp(log_p, out=scratch[: len(log_p)])
                per_nat = grad_entropy[part, None] / ctx.temperature
                grad = log_p.add_(entropy[part, None]).mul_(-per_nat).sub_(at_target).mul_(p)
            grad = grad.scatter_add_(1, targets[part, None], at_target).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ head_weight
            if grad_head is not None:
                add_product(grad_head, grad.T, hidden[part])
        return grad_hidden, None if grad_head is None else grad_head.to(head_weight.dtype), None, None, None


class LogitChunks:
    """Logits of one chunk of tokens after another, in one buffer: each chunk's are gone when the next is asked for."""

    def __init__(self, hidden: Tensor, head_weight: Tensor, temperature: Number, chunk_size: int) -> None:
        self.hidden = hidden
        self.head_weight = head_weight
        self.temperature = temperature
        self.rows = min(chunk_size, len(hidden))
        self.precision = torch.promote_types(hidden.dtype, torch.float32)

    def buffer(self) -> Tensor:
        """An uninitialised tensor for one chunk's logits; reuse saves the system from clearing new pages each time."""
        return self.hidden.new_empty(self.rows, len(self.head_weight), dtype=self.precision)

    def of(self, part: slice, buffer: Tensor) -> Tensor:
        """Tempered logits of the tokens ``part``, written to ``buffer``."""
        logits = buffer[: part.stop - part.start]
        if self.precision == self.hidden.dtype:
            torch.mm(self.hidden[part], self.head_weight.T, out=logits)
        else:
            logits.copy_(torch.mm(self.hidden[part], self.head_weight.T))
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        buffer = self.buffer()
        for start in range(0, len(self.hidden), max(self.rows, 1)):
            part = slice(start, min(start + self.rows, len(self.hidden)))
            yield part, self.of(part, buffer)


class LogitGradients:
    """Gradients to hidden states and head, gathered chunk by chunk from the gradients to the logits."""

    def __init__(self, ctx: Any, hidden: Tensor, head: Tensor, precision: torch.dtype) -> None:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        self.inputs = hidden, head
        self.hidden = torch.empty_like(hidden) if needs_hidden else None
        self.head = torch.zeros_like(head, dtype=precision) if needs_head else None

    def add(self, part: slice, grad: Tensor) -> None:
        """Take in the gradient to the logits, before the temperature, of the tokens ``part``."""
        hidden, head = self.inputs
        grad = grad.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[part] = grad @ head
        if self.head is not None:
            add_product(self.head, grad.T, hidden[part])

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradient to the hidden states and to the head; None where none was asked for."""
        return self.hidden, None if self.head is None else self.head.to(self.inputs[1].dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in total's precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
