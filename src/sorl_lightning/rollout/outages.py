"""Collections that go on although an engine has been lost for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from sorl_lightning import ranks
from sorl_lightning.errors import EngineOutage

logger = logging.getLogger(__name__)
T = TypeVar("T")
OUTAGES = 2  # times that a collection may lose its engine before the run ends


def despite_outages(attempt: Callable[[], T]) -> T:
    """Collect on all ranks, and again where an engine was lost: the same seeds give what was interrupted.

    Raises:
        EngineOutage: it was lost once too often.
    """
    for _ in range(OUTAGES):
        try:
            return ranks.together(attempt)
        except EngineOutage as error:
            logger.warning("%s; the collection starts again, with its weights loaded anew", error)
    return ranks.together(attempt)
