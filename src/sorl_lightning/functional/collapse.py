"""When a run counts as collapsed, and when it looks like it is about to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sorl_lightning.functional.checks import check_count


def has_collapsed(success: Sequence[float]) -> bool:
    """Whether success stayed below half of its best for the whole last fifth of the run.

    Args:
        success: share of successful trajectories of each collection.

    >>> has_collapsed([0.4, 0.6, 0.5, 0.2, 0.1]), has_collapsed([0.4, 0.6, 0.5, 0.2, 0.3])
    (True, False)
    """
    last = success[len(success) - math.ceil(len(success) / 5) :]
    return len(last) > 0 and max(last) < max(success) / 2


def is_collapsing(success: Sequence[float], clip_fraction: Sequence[float], window: int = 5) -> bool:
    """Whether success has fallen below half of its best window while more tokens were clipped than in that window.

    Args:
        success: share of successful trajectories of each collection.
        clip_fraction: share of clipped tokens over the updates of each.
        window: collections whose mean is compared; there must be two windows' worth.

    Raises:
        ValueError: ``window`` below 1.
    """
    check_count("window", window)
    if len(success) < 2 * window:
        return False
    starts = range(len(success) - window + 1)
    means = [sum(success[start : start + window]) / window for start in starts]
    best = max(starts, key=means.__getitem__)
    clipped = [sum(clip_fraction[start : start + window]) / window for start in (best, starts[-1])]
    return means[-1] < means[best] / 2 and clipped[1] > clipped[0]
