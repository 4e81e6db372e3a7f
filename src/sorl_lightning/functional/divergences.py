"""Divergences of the student S from the teacher T at one token, nats: over the vocabulary, the top K, or one sample."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_choice, check_range, check_same_shape

Kind = Literal["reverse_kl", "forward_kl", "jsd"]
Estimator = Literal["k1", "k2", "k3"]


def divergence(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    kind: Kind = "reverse_kl",
    beta: Number = 0.5,
) -> Float[Tensor, "*N"]:
    """Divergence over the full vocabulary; every kind trains by backpropagation.

        reverse_kl  KL(S||T) = sum_v p_S (log p_S - log p_T)
        forward_kl  KL(T||S) = sum_v p_T (log p_T - log p_S)
        jsd         beta KL(T||M) + (1 - beta) KL(S||M),    M = beta p_T + (1 - beta) p_S

    At beta 0 and 1, where the formula gives 0, "jsd" is the forward and the reverse KL: the limits of JSD / beta and
    JSD / (1 - beta). A token that the first distribution of a KL excludes adds 0; one that only the second excludes
    makes it infinite. The result is in float32 at least.

    Args:
        student_logits: tempered logits of the student; keeps its graph.
        teacher_logits: the same of the teacher, over the same vocabulary (cut logits to the common size before).
        kind: which divergence.
        beta: weight of the teacher in "jsd", in [0, 1]; the other kinds do not read it.

    Raises:
        ValueError: an unknown ``kind``, ``beta`` out of range or shapes that differ.

    Source: Zhou et al. 2026, arXiv:2607.05804 (reverse KL); Agarwal et al. 2024, arXiv:2306.13649 (jsd).
    """
    check_same_shape(student_logits=student_logits, teacher_logits=teacher_logits)
    return _between(_wide(student_logits).log_softmax(-1), _wide(teacher_logits).log_softmax(-1), kind, beta)


def topk_divergence(
    student_logits: Float[Tensor, "*N V"],
    teacher_ids: Int[Tensor, "*N K"],
    teacher_logprobs: Float[Tensor, "*N K"],
    kind: Kind = "reverse_kl",
    tail: bool = True,
    beta: Number = 0.5,
) -> Float[Tensor, "*N"]:
    """Divergence over the K tokens that a teacher reports.

    With ``tail`` all other tokens form one more outcome, of probability 1 - S for the student and 1 - T for the teacher
    (S, T the mass on K); for the reverse KL that adds (1 - S) [log(1 - S) - log(1 - T)]. The result is then at least 0
    (to rounding), 0 with a zero gradient where the two agree, and at most the full divergence, which K = V gives.
    Without it the sum over K alone may be negative and drives mass out of K; offered to replicate published runs.

    Args:
        student_logits: tempered logits of the student; keeps its graph.
        teacher_ids: distinct token ids.
        teacher_logprobs: their log-probabilities, nats; -inf marks an entry that is only padding.
        kind: which divergence, as in ``divergence``.
        tail: whether the other tokens count.
        beta: weight of the teacher in "jsd".

    Raises:
        ValueError: an unknown ``kind``, ``beta`` out of range or shapes that differ.

    Source: Zhou et al. 2026, arXiv:2607.05804 (top-50 reverse KL); the tail is ours.
    """
    check_same_shape(teacher_ids=teacher_ids, teacher_logprobs=teacher_logprobs)
    logits, teacher = _wide(student_logits), _wide(teacher_logprobs)
    student = logits.gather(-1, teacher_ids.long()) - logits.logsumexp(-1, keepdim=True)
    student = student.masked_fill(teacher == -math.inf, -math.inf)
    if tail:
        student, teacher = _with_tail(student), _with_tail(teacher)
    return _between(student, teacher, kind, beta)


def sampled_divergence(
    student_logprobs: Float[Tensor, "*N"], teacher_logprobs: Float[Tensor, "*N"], estimator: Estimator = "k1"
) -> Float[Tensor, "*N"]:
    """Estimate of the reverse KL from one token y that the student sampled; d = log p_T(y) - log p_S(y).

        k1  -d             mean: the reverse KL. As a loss its gradient is 0 in expectation: use -k1 as an advantage
        k2  d^2 / 2        as a loss its expected gradient is the reverse KL's
        k3  e^d - d - 1    d held to +-20; mean: the reverse KL, never negative. As a loss: the forward KL's gradient

    Args:
        student_logprobs: log-probability of the sampled token under the student, nats; keeps its graph.
        teacher_logprobs: the same under the teacher (or reference).
        estimator: which of the above.

    Raises:
        ValueError: an unknown ``estimator`` or shapes that differ.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    check_choice("estimator", estimator, Estimator)
    check_same_shape(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    gap = teacher_logprobs - student_logprobs
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap.square() / 2
    gap = gap.clamp(-20, 20)
    return gap.expm1() - gap


def topk_entropy(logprobs: Float[Tensor, "*N K"]) -> Float[Tensor, "*N"]:
    """Entropy of K tokens and the rest as one more outcome, nats: a lower bound of the whole distribution's.

    Args:
        logprobs: log-probabilities of distinct tokens; -inf marks padding.
    """
    outcomes = _with_tail(_wide(logprobs))
    return -(outcomes.exp() * outcomes.clamp(min=torch.finfo(outcomes.dtype).min)).sum(-1)


def _between(student: Tensor, teacher: Tensor, kind: Kind, beta: Number) -> Tensor:
    """Divergence of two tensors of log-probabilities over their last dimension."""
    check_choice("kind", kind, Kind)
    check_range("beta", beta, 0.0, 1.0)
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        return _kl(student, teacher)
    if kind == "forward_kl" or beta == 0:
        return _kl(teacher, student)
    mixture = beta * teacher.exp() + (1 - beta) * student.exp()
    log_mixture = torch.where(mixture > 0, mixture, 1).log()  # where both are 0 the KLs add 0 anyway
    return beta * _kl(teacher, log_mixture) + (1 - beta) * _kl(student, log_mixture)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    probability = first.exp()
    return (probability * torch.where(probability > 0, first - second, 0)).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    """Append the log of the mass that is left; rounding may leave none, so it is held to the dtype's resolution."""
    left = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, left.clamp(min=torch.finfo(left.dtype).eps).log()], dim=-1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
