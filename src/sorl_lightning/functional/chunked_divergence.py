"""Divergence of student and teacher from hidden states, without a [tokens, vocabulary] tensor of either."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from sorl_lightning.functional.checks import Number, check_choice, check_count, check_positive, check_range
from sorl_lightning.functional.divergences import Kind
from sorl_lightning.functional.logprobs import LogitChunks, LogitGradients, logit_dtype


def chunked_divergence(
    hidden: Float[Tensor, "N D"],
    head_weight: Float[Tensor, "V D"],
    teacher_hidden: Float[Tensor, "N E"],
    teacher_head_weight: Float[Tensor, "V E"],
    kind: Kind = "reverse_kl",
    beta: Number = 0.5,
    temperature: Number = 1.0,
    chunk_size: int = 128,
) -> Float[Tensor, "N"]:
    """``divergence`` over the full vocabulary at each token.

    Logits of both models live for ``chunk_size`` tokens at a time, and the backward pass computes them again. The
    gradient reaches ``hidden`` and ``head_weight``, once (no second derivatives); the teacher gets none.

    Args:
        hidden: the student's last hidden state at the position that predicts each token; N may be 0.
        head_weight: weight of the student's output layer.
        teacher_hidden: the teacher's hidden states at the same positions.
        teacher_head_weight: weight of its output layer, over the same vocabulary.
        kind: which divergence, as in ``divergence``.
        beta: weight of the teacher in "jsd".
        temperature: of both distributions.
        chunk_size: tokens whose logits exist together.

    Returns:
        nats, in float32 at least.

    Raises:
        ValueError: what ``divergence`` refuses, a ``temperature`` that is not positive or a ``chunk_size`` below 1.

    Source: Zhou et al. 2026, arXiv:2607.05804, whose runs take the teacher's top 50 instead.
    """
    check_positive("temperature", temperature)
    check_count("chunk_size", chunk_size)
    check_choice("kind", kind, Kind)
    check_range("beta", beta, 0.0, 1.0)
    check_shapes(hidden, head_weight, teacher_hidden, teacher_head_weight)
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse_kl" if beta == 1 else "forward_kl"
    dtype = logit_dtype(hidden, head_weight)
    dtype = torch.promote_types(dtype, logit_dtype(teacher_hidden, teacher_head_weight))
    models = [
        tensor.to(dtype) for tensor in (hidden, head_weight, teacher_hidden.detach(), teacher_head_weight.detach())
    ]
    return _Divergence.apply(*models, kind, float(beta), temperature, chunk_size)


def check_shapes(hidden: Tensor, head_weight: Tensor, teacher_hidden: Tensor, teacher_head_weight: Tensor) -> None:
    """Refuse hidden states and heads that do not fit one another."""
    fits = hidden.shape[1:] == head_weight.shape[1:] and teacher_hidden.shape[1:] == teacher_head_weight.shape[1:]
    if not fits or len(hidden) != len(teacher_hidden) or len(head_weight) != len(teacher_head_weight):
        raise ValueError(
            "shapes must be hidden [N, D], head_weight [V, D], teacher_hidden [N, E], teacher_head_weight [V, E], got "
            f"{tuple(hidden.shape)}, {tuple(head_weight.shape)}, {tuple(teacher_hidden.shape)} and "
            f"{tuple(teacher_head_weight.shape)}; cut both heads to the common vocabulary before"
        )


class _Divergence(torch.autograd.Function):
    """Written out by hand: with four buffers that every chunk reuses it keeps up with whole tensors."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor,
        kind: Kind, beta: float, temperature: Number, chunk_size: int,
    ) -> Tensor:  # fmt: skip
        student = LogitChunks(hidden, head, temperature, chunk_size)
        teacher = LogitChunks(teacher_hidden, teacher_head, temperature, chunk_size)
        buffers = [student.buffer() for _ in range(4 if kind == "jsd" else 3)]
        sizes = (4, len(hidden))
        values, of_student, log_student, log_teacher = hidden.new_zeros(sizes, dtype=student.precision)
        for part, s in student:
            t, p, *more = (buffer[: len(s)] for buffer in buffers)
            teacher.of(part, t)
            if kind == "reverse_kl":
                log_teacher[part] = _normalise(t, p)
                log_student[part] = _normalise(s, p)
                values[part] = of_student[part] = p.mul_(s.sub_(t)).sum(1)
                continue
            log_student[part] = _normalise(s, p)
            if kind == "forward_kl":
                log_teacher[part] = _normalise(t, p)
                values[part] = p.mul_(t.sub_(s)).sum(1)
                continue
            q, m = more
            log_teacher[part] = _normalise(t, q)
            torch.add(q.mul(beta), p, alpha=1 - beta, out=m).clamp_(min=torch.finfo(m.dtype).tiny).log_()
            of_student[part] = p.mul_(s.sub_(m)).sum(1)
            values[part] = beta * q.mul_(t.sub_(m)).sum(1) + (1 - beta) * of_student[part]
        ctx.save_for_backward(hidden, head, teacher_hidden, teacher_head, of_student, log_student, log_teacher)
        ctx.settings = kind, beta, temperature, chunk_size
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, teacher_hidden, teacher_head, of_student, log_student, log_teacher = ctx.saved_tensors
        kind, beta, temperature, chunk_size = ctx.settings
        student = LogitChunks(hidden, head, temperature, chunk_size)
        teacher = LogitChunks(teacher_hidden, teacher_head, temperature, chunk_size)
        buffers = student.buffer(), student.buffer()
        grads = LogitGradients(ctx, hidden, head, student.precision)
        scale = grad_values / temperature * (1 - beta if kind == "jsd" else 1)
        for part, s in student:
            t, p = (buffer[: len(s)] for buffer in buffers)
            teacher.of(part, t).sub_(log_teacher[part, None])
            s.sub_(log_student[part, None])
            if kind == "forward_kl":
                grads.add(part, s.exp_().sub_(t.exp_()).mul_(scale[part, None]))
                continue
            torch.exp(s, out=p)
            if kind == "jsd":
                t.exp_().mul_(beta).add_(p, alpha=1 - beta).clamp_(min=torch.finfo(t.dtype).tiny).log_()
            grads.add(part, s.sub_(t).sub_(of_student[part, None]).mul_(p).mul_(scale[part, None]))
        return *grads.result(), None, None, None, None, None, None


def _normalise(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Turn logits into log-probabilities, in place, and write the probabilities; what was subtracted."""
    largest = logits.amax(1, keepdim=True)
    logits.sub_(largest)
    total = torch.exp(logits, out=probabilities).sum(1, keepdim=True)
    logits.sub_(total.log())
    probabilities.div_(total)
    return (largest + total.log())[:, 0]
