"""How deep the next rollouts go: probes, what a probe shows, and the cap that follows.

Turns are 0-based and iterations 1-based, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_choice, check_count, check_range
from sorl_lightning.types import TurnStatistics

Coverage = Literal["success", "all"]

# A half that the paper's guard 1e-8 or float arithmetic left just below itself still rounds up, and .7 * 10 is 7.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class DepthState:
    """What the controller remembers between probes; plain numbers, so ``dataclasses.asdict`` checkpoints it.

    Example: ``DepthState(50.0)`` before the first probe of an environment of 50 turns.

    Attributes:
        smoothed: moving average of the last turn index worth playing; starts at the largest number of turns.
        coverage: last turn index that covers enough trajectories, as of the last probe that could tell.
        effective: mean turn index of the divergence at the last probe.
        misses: probes since one had enough successes.
    """

    smoothed: Number
    coverage: int = 0
    effective: int = 0
    misses: int = 0


def is_probe(iteration: int, warmup: int = 3, interval: int = 8) -> bool:
    """Whether an iteration is rolled out to full depth: iteration <= warmup, or divisible by interval.

    Args:
        iteration: collection about to be made, counted from 1.
        warmup: first iterations that are all probes.
        interval: iterations from one later probe to the next.

    Raises:
        ValueError: ``iteration`` or ``interval`` below 1, or ``warmup`` below 0.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.1.
    """
    check_count("iteration", iteration)
    check_count("warmup", warmup, 0)
    check_count("interval", interval)
    return iteration <= warmup or iteration % interval == 0


def observe(
    state: DepthState,
    statistics: TurnStatistics,
    quantile: Number = 0.8,
    min_successes: int = 8,
    smoothing: Number = 0.3,
    coverage_of: Coverage = "success",
    slack: int = 0,
    fallback_after: int | None = None,
    fallback_quantile: Number = 0.5,
) -> DepthState:
    """State after a probe; call it for probes only, and with the statistics of the whole batch.

        m_t = max(K_t, 0) n_t / n_0,    H_eff = round_half_up(sum_t t m_t / (sum_t m_t + 1e-8))
        H_cov = least H with at least ``quantile`` of the trajectories ending at a turn <= H
        smoothed <- (1 - smoothing) smoothed + smoothing max(H_eff, H_cov + slack)

    with K_t the mean divergence per token at turn t and n_t the trajectories that reach it. H_cov is refreshed only by
    a probe with ``min_successes`` trajectories to count. A probe without a generated token changes nothing.

    Args:
        state: state before the probe.
        statistics: counts of the probe.
        quantile: share of trajectories to cover, in (0, 1].
        min_successes: fewest trajectories that H_cov is read from.
        smoothing: weight of the new observation, in (0, 1].
        coverage_of: whose last turns are covered: successful trajectories or all.
        slack: turns added to H_cov; 1 is the literal reading of a 1-based formula.
        fallback_after: probes in a row without enough successes after which all trajectories stand in; None: never.
        fallback_quantile: share of all trajectories to cover then.

    Raises:
        ValueError: an unknown ``coverage_of``, a number out of range, or a divergence that is not finite.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.1; slack and fallback are ours.
    """
    check_choice("coverage_of", coverage_of, Coverage)
    check_count("min_successes", min_successes)
    for name, value in (("quantile", quantile), ("smoothing", smoothing), ("fallback_quantile", fallback_quantile)):
        check_range(name, value, 0.0, 1.0)
    if not statistics.tokens.any():
        return state
    last_turns = statistics.success_last_turns if coverage_of == "success" else statistics.all_last_turns
    misses = 0 if last_turns.sum() >= min_successes else state.misses + 1
    coverage = state.coverage
    if misses == 0:
        coverage = _covering_turn(last_turns, quantile)
    elif fallback_after is not None and misses >= fallback_after:
        coverage = _covering_turn(statistics.all_last_turns, fallback_quantile)
    effective = effective_depth(statistics)
    smoothed = (1 - smoothing) * state.smoothed + smoothing * max(effective, coverage + slack)
    return DepthState(smoothed=smoothed, coverage=coverage, effective=effective, misses=misses)


def effective_depth(statistics: TurnStatistics) -> int:
    """Mean turn index of the divergence, H_eff = round_half_up(sum_t t m_t / (sum_t m_t + 1e-8)); see ``observe``.

    Args:
        statistics: counts of a probe.

    Raises:
        ValueError: a divergence that is not finite.
    """
    if not statistics.divergence_sum.isfinite().all():
        raise ValueError(f"divergence_sum must be finite, got {statistics.divergence_sum.tolist()}")
    if not len(statistics.tokens):
        return 0
    reached = statistics.trajectories.double()
    mean = statistics.divergence_sum.double() / statistics.tokens.double().clamp(min=1)
    mass = mean.clamp(min=0) * reached / reached[0].clamp(min=1)
    turns = torch.arange(len(mass), dtype=torch.float64, device=mass.device)
    return _round_half_up(float((turns * mass).sum() / (mass.sum() + 1e-8)))


def cap(state: DepthState, minimum: int = 2, maximum: int | None = None) -> int:
    """Most turns of the next rollouts that are no probe: clip(round_half_up(smoothed) + 1, minimum, maximum).

    Args:
        state: what the probes showed.
        minimum: fewest turns.
        maximum: most turns, the environment's; it wins over a larger ``minimum``.

    Raises:
        ValueError: no ``maximum``, or ``minimum`` or ``maximum`` below 1.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.1.
    """
    if maximum is None:
        raise ValueError("maximum is required: the most turns that the environment allows")
    check_count("minimum", minimum)
    check_count("maximum", maximum)
    return min(max(_round_half_up(state.smoothed) + 1, minimum), maximum)


def _covering_turn(last_turns: Float[Tensor, "H"], quantile: Number) -> int:
    """Least turn index by which a share ``quantile`` of the trajectories has ended."""
    ended = last_turns.double().cumsum(0)
    return int((ended < quantile * ended[-1] - _ROUNDING).sum())


def _round_half_up(value: Number) -> int:
    return math.floor(value + 0.5 + _ROUNDING)
