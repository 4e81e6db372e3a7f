"""A request on its way between the event loop, which waits for it, and the thread that decodes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.types import Completion


class Ticket:
    """Who waits for a turn, and where to tell them. Made in the loop that waits; answered from any thread.

    Args:
        request: what to generate.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def answer(self, completion: Completion) -> None:
        """Hand the turn over, unless nobody waits for it any more."""
        self._settle(self.completion.set_result, completion)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in whoever still waits."""
        self._settle(self.completion.set_exception, error)

    def _settle(self, method: Callable[[Any], None], value: object) -> None:
        def settle() -> None:
            if not self.completion.done():
                method(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            self.completion.get_loop().call_soon_threadsafe(settle)
