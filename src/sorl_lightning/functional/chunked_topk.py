"""The teacher's top K, and the divergence over it, from hidden states: chunk by chunk of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from sorl_lightning.functional.checks import Number, check_count, check_positive
from sorl_lightning.functional.divergences import Kind, topk_divergence
from sorl_lightning.functional.logprobs import LogitChunks, LogitGradients, logit_dtype

Compare = Callable[[Tensor, slice], Tensor]


def chunked_topk_divergence(
    hidden: Float[Tensor, "N D"],
    head_weight: Float[Tensor, "V D"],
    teacher_ids: Int[Tensor, "N K"],
    teacher_logprobs: Float[Tensor, "N K"],
    kind: Kind = "reverse_kl",
    tail: bool = True,
    beta: Number = 0.5,
    temperature: Number = 1.0,
    chunk_size: int = 32,
) -> Float[Tensor, "N"]:
    """``topk_divergence`` at each token, chunk by chunk as in ``chunked_divergence``.

    Args:
        hidden: the student's last hidden state at the position that predicts each token; N may be 0.
        head_weight: weight of the student's output layer.
        teacher_ids: the teacher's top K at each token.
        teacher_logprobs: their log-probabilities at ``temperature``, nats.
        kind: which divergence.
        tail: whether the tokens outside the top K count, as one outcome.
        beta: weight of the teacher in "jsd".
        temperature: of the student's distribution; the teacher's must have been taken at the same.
        chunk_size: tokens whose logits exist together.

    Raises:
        ValueError: what ``topk_divergence`` refuses, a ``temperature`` not above 0 or a ``chunk_size`` below 1.
    """

    def compare(logits: Tensor, part: slice) -> Tensor:
        return topk_divergence(logits, teacher_ids[part], teacher_logprobs[part], kind, tail, beta)

    return over_logits(compare, hidden, head_weight, temperature, chunk_size)


@torch.no_grad()
def chunked_topk(
    hidden: Float[Tensor, "N D"],
    head_weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "N"],
    k: int,
    temperature: Number = 1.0,
    chunk_size: int = 256,
) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"], Float[Tensor, "N"]]:
    """Top K of each distribution with their log-probabilities, and the log-probability of the target; no gradient.

    Args:
        hidden: last hidden state at the position that predicts each target; N may be 0.
        head_weight: weight of the output layer.
        targets: token ids.
        k: how many; 0 gives none, more than the vocabulary all of it.
        temperature: of the distribution.
        chunk_size: tokens whose logits exist together.

    Raises:
        ValueError: ``k`` below 0, a ``temperature`` that is not positive or a ``chunk_size`` below 1.
    """
    check_count("k", k, 0)
    check_positive("temperature", temperature)
    check_count("chunk_size", chunk_size)
    dtype = logit_dtype(hidden, head_weight)
    chunks = LogitChunks(hidden.to(dtype), head_weight.to(dtype), temperature, chunk_size)
    width = min(k, len(head_weight))
    ids = targets.new_zeros(len(hidden), width)
    logprobs = hidden.new_zeros(len(hidden), width, dtype=chunks.precision)
    sampled = hidden.new_zeros(len(hidden), dtype=chunks.precision)
    for part, logits in chunks:
        normaliser = logits.logsumexp(1, keepdim=True)
        top = logits.topk(width, dim=1)
        ids[part], logprobs[part] = top.indices, top.values - normaliser
        sampled[part] = (logits.gather(1, targets[part, None].long()) - normaliser)[:, 0]
    return ids, logprobs, sampled


def over_logits(
    compare: Compare, hidden: Tensor, head_weight: Tensor, temperature: Number, chunk_size: int
) -> Float[Tensor, "N"]:
    """``compare`` of the tempered logits of one chunk of tokens after another, with its gradient.

    Args:
        compare: from the logits of some tokens, and which tokens they are, to one number each.
        hidden: [N, D]; head_weight: [V, D].
        temperature: of the logits.
        chunk_size: tokens whose logits exist together.

    Raises:
        ValueError: a ``temperature`` that is not positive or a ``chunk_size`` below 1.
    """
    check_positive("temperature", temperature)
    check_count("chunk_size", chunk_size)
    dtype = logit_dtype(hidden, head_weight)
    return _OverLogits.apply(hidden.to(dtype), head_weight.to(dtype), compare, temperature, chunk_size)


class _OverLogits(torch.autograd.Function):
    """Autograd inside a chunk, accumulation across chunks; each chunk's graph is gone before the next is built."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, compare: Compare, temperature: Number, chunk_size: int
    ) -> Tensor:
        chunks = LogitChunks(hidden, head_weight, temperature, chunk_size)
        values = hidden.new_zeros(len(hidden), dtype=chunks.precision)
        for part, logits in chunks:
            values[part] = compare(logits, part)
        ctx.save_for_backward(hidden, head_weight)
        ctx.compare, ctx.temperature, ctx.chunk_size = compare, temperature, chunk_size
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight = ctx.saved_tensors
        chunks = LogitChunks(hidden, head_weight, ctx.temperature, ctx.chunk_size)
        grads = LogitGradients(ctx, hidden, head_weight, chunks.precision)
        for part, logits in chunks:
            with torch.enable_grad():
                logits = logits.detach().requires_grad_()
                values = ctx.compare(logits, part)
            (grad,) = torch.autograd.grad(values, logits, grad_values[part] / ctx.temperature)
            grads.add(part, grad)
        return *grads.result(), None, None, None
