"""What the neighbours of TurnOPD multiply each token's weight by."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_positive, check_range, check_same_shape
from sorl_lightning.functional.turns import fill, segments
from sorl_lightning.types import TokenSignals


def decay_factors(turn: Int[Tensor, "B T"], kappa: Number) -> Float[Tensor, "B T"]:
    """kappa^t at turn t: the first turn counts fully.

    Args:
        turn: turn of each token, -1 where the policy did not generate it.
        kappa: decay from turn to turn, in [0, 1].

    Raises:
        ValueError: ``kappa`` out of range.
    """
    check_range("kappa", kappa, 0.0, 1.0)
    return torch.where(turn >= 0, torch.pow(float(kappa), turn.clamp(min=0).float()), 0.0)


def disagreement_factors(signals: TokenSignals) -> Float[Tensor, "B T"]:
    """1 - (1 - d)(1 - h) of each turn: turns count where student and teacher disagree or the student is unsure.

    d is the turn's mean divergence and h its mean student entropy, each moved to [0, 1] by the least and the largest
    over the turns of the collection; where all turns are alike both are 0, and so every factor is 1.

    Source: arXiv:2606.27814 (ATOD); where the extremes are taken is our choice.
    """
    turns = segments(signals.turn, signals.trajectory, "turn")
    disagreement = _min_max(turns.mean(signals.divergence[turns.generated]))
    uncertainty = _min_max(turns.mean(signals.student_entropy[turns.generated]))
    factors = 1 - (1 - disagreement) * (1 - uncertainty)
    return turns.to_tokens(factors if bool(factors.any()) else torch.ones_like(factors))


def confidence_factors(signals: TokenSignals, weak: Number = 0.1, strong: Number = 0.5) -> Float[Tensor, "B T"]:
    """i_t c_t of each turn: how much there is to learn, times how sure the teacher is.

    i_t is 0 where the turn's mean divergence is below ``weak``, .5 up to ``strong`` and 1 from there on. c_t is the
    mean probability of the teacher's most likely token.

    Args:
        signals: of a collection.
        weak: least divergence of a turn that counts, nats a token.
        strong: least divergence of a turn that counts fully.

    Raises:
        ValueError: not 0 <= weak <= strong.

    Source: arXiv:2606.19659 (SAGE-OPD); what makes a turn weak or strong is our choice.
    """
    if not 0 <= weak <= strong:
        raise ValueError(f"need 0 <= weak <= strong, got {weak!r} and {strong!r}")
    turns = segments(signals.turn, signals.trajectory, "turn")
    divergence = turns.mean(signals.divergence[turns.generated])
    importance = 0.5 * (divergence >= weak).float() + 0.5 * (divergence >= strong).float()
    return turns.to_tokens(importance * turns.mean(signals.teacher_confidence[turns.generated]))


def drift_factors(signals: TokenSignals, threshold: Number = 0.7, rate: Number = 0.01) -> Float[Tensor, "B T"]:
    """clip(1 - rate C, 0, 1) + .5, with C the positions so far at which the top 16 of both models overlap too little.

    C counts the trajectory's generated tokens up to and including this one whose overlap is below ``threshold``.

    Args:
        signals: of a collection; a trajectory's rows are in order.
        threshold: overlap below which a position has drifted, in [0, 1].
        rate: what each such position takes from the factor.

    Raises:
        ValueError: a number out of range.

    Source: arXiv:2605.07804 (Prune-OPD).
    """
    check_range("threshold", threshold, 0.0, 1.0)
    check_positive("rate", rate)
    groups = segments(signals.turn, signals.trajectory, "trajectory")
    drifted = (signals.overlap[groups.generated] < threshold).double()
    order = groups.index.argsort(stable=True)  # each trajectory's tokens together, in the order of rows and positions
    running = drifted[order].cumsum(0)
    before = (
        torch.cat([running.new_zeros(1), running])[groups.sizes.cumsum(0) - groups.sizes] if len(order) else running
    )
    count = torch.empty_like(running)
    count[order] = running - before[groups.index[order]]
    return fill(groups.generated, ((1 - rate * count).clamp(0, 1) + 0.5).float())


def top_overlap(student_ids: Int[Tensor, "N K"], teacher_ids: Int[Tensor, "N K"]) -> Float[Tensor, "N"]:
    """Share of the student's ids that are among the teacher's.

    Args:
        student_ids: distinct in each row.
        teacher_ids: likewise.

    Raises:
        ValueError: shapes that differ.
    """
    check_same_shape(student_ids=student_ids, teacher_ids=teacher_ids)
    return (student_ids[:, :, None] == teacher_ids[:, None, :]).any(-1).float().mean(-1)


def _min_max(values: Tensor) -> Tensor:
    if not len(values):
        return values
    spread = values.max() - values.min()
    return (values - values.min()) / spread if spread > 0 else torch.zeros_like(values)
