"""Schedules: functions of the share of optimiser steps taken, or of the iterations (collections) made."""

from __future__ import annotations

import math

from sorl_lightning.functional.checks import Number, check_count, check_range


def linear_ramp(progress: Number, start: Number = 0.0, end: Number = 1.0) -> float:
    """Rise from 0 at ``start`` to 1 at ``end`` in a straight line: clip((progress - start) / (end - start), 0, 1).

    Args:
        progress: optimiser steps taken / planned; below ``start`` gives 0 and above ``end`` 1.
        start: progress at which the ramp begins.
        end: progress at which it is complete.

    Raises:
        ValueError: ``start`` not below ``end``, or a ``progress`` of nan.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.2.
    """
    if not start < end:
        raise ValueError(f"start must be below end, got start {start!r} and end {end!r}")
    if math.isnan(progress):
        raise ValueError(f"progress must be a number, got {progress!r}")
    return min(max((progress - start) / (end - start), 0.0), 1.0)


def cosine_ramp(progress: Number, start: Number = 0.0, end: Number = 1.0) -> float:
    """Rise from 0 at ``start`` to 1 at ``end`` along half a cosine: (1 - cos(pi x)) / 2 of the linear ramp x.

    Args:
        progress: optimiser steps taken / planned.
        start: progress at which the ramp begins.
        end: progress at which it is complete.

    Raises:
        ValueError: as ``linear_ramp``.
    """
    return (1 - math.cos(math.pi * linear_ramp(progress, start, end))) / 2


def staircase(iteration: int, start: int = 1, rise: int = 1, every: int = 2, *, maximum: int) -> int:
    """Depth that rises with the iterations alone: min(start + rise floor(iteration / every), maximum), turns.

    Args:
        iteration: iterations made so far.
        start: turns at the beginning.
        rise: turns added at each step.
        every: iterations from step to step.
        maximum: most turns, the environment's.

    Raises:
        ValueError: ``every``, ``start`` or ``maximum`` below 1, ``rise`` or ``iteration`` below 0.

    Source: arXiv:2604.24005 (TCOD-F2B: 1, 1, 2); arXiv:2605.31490 (POPD).
    """
    for name, value, least in (
        ("iteration", iteration, 0),
        ("start", start, 1),
        ("rise", rise, 0),
        ("every", every, 1),
    ):
        check_count(name, value, least)
    check_count("maximum", maximum)
    return min(start + rise * (iteration // every), maximum)


def fraction(share: Number, maximum: int) -> int:
    """A fixed part of the full depth: ceil(share maximum), at least 1, turns.

    Args:
        share: part of the depth, in [0, 1].
        maximum: most turns, the environment's.

    Raises:
        ValueError: ``share`` out of range or ``maximum`` below 1.

    Source: arXiv:2605.31490 (TOPD).
    """
    check_range("share", share, 0.0, 1.0)
    check_count("maximum", maximum)
    return max(math.ceil(share * maximum - 1e-9), 1)


def expert_prefix(iteration: int, length: int, every: int = 2) -> int:
    """Expert turns to replay before the student takes over: max(0, length - 1 - floor(iteration / every)).

    Args:
        iteration: iterations made so far.
        length: turns of the expert's trace.
        every: iterations after which the student takes over one turn earlier.

    Raises:
        ValueError: ``every`` below 1, ``length`` or ``iteration`` below 0.

    Source: arXiv:2604.24005 (TCOD-B2F).
    """
    for name, value, least in (("iteration", iteration, 0), ("length", length, 0), ("every", every, 1)):
        check_count(name, value, least)
    return max(0, length - 1 - iteration // every)
