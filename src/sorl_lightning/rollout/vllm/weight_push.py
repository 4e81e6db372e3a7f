"""New weights for running servers: pause, deliver, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from torch import Tensor

from sorl_lightning.errors import EngineOutage, RolloutError
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.rollout.vllm.transports import WeightTransport
from sorl_lightning.rollout.vllm.wire import Server

InFlight = Literal["keep", "wait"]


class WeightPush:
    """Pushes weights to all servers, in the calling thread.

    A push that fails raises and leaves the servers paused, with half-new weights that nobody can sample from; the next
    push begins from scratch and repairs them.

    Args:
        servers: all get the same weights.
        loop: where their connections live.
        transport: carries the weights.
        in_flight: turns in flight are frozen and go on with the new weights ("keep"), or waited for ("wait").
        timeout: seconds that a push may take, all buckets together.
        bucket_bytes: most bytes of gathered weights to hold at a time.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        loop: EventLoopThread,
        transport: WeightTransport,
        in_flight: InFlight,
        timeout: float,
        bucket_bytes: int,
    ) -> None:
        self.servers = servers
        self.loop = loop
        self.transport = transport
        self.in_flight = in_flight
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        self._connected = False
        self._deadline = 0.0

    def push(self, weights: Iterable[tuple[str, Tensor]], name: str) -> None:
        """Give the servers ``weights``, which they call ``name`` from then on.

        Raises:
            EngineOutage: a server failed or did not answer in time; the message has its own words.
            ServerError: a server refused.
        """
        self._deadline = time.monotonic() + self.timeout
        try:
            self._all(f"/pause?mode={self.in_flight}")
            if not self._connected:
                self.transport.connect(self._post, [s.workers for s in self.servers], self.timeout)
            self._connected = False  # until the push is through
            self.transport.deliver(weights, name, self._post, self.bucket_bytes)
            self._connected = True
            self._all("/resume")
        except RolloutError as error:
            raise type_of(error)(f"weights {name} were not pushed: {error}") from error

    def start_over(self) -> None:
        """Connect anew at the next push: a server was restarted."""
        self._connected = False

    def _all(self, route: str) -> None:
        self._post(route, [None]).result()

    def _post(self, route: str, bodies: Sequence[dict[str, Any] | None]) -> Future[Any]:
        """Ask all servers, with one body for each or one for all."""
        each = [*bodies] * len(self.servers) if len(bodies) == 1 else [*bodies]
        left = self._left()
        return self._run([s.client.post(route, body, left) for s, body in zip(self.servers, each, strict=True)])

    def _left(self) -> float:
        """Seconds to the deadline, never 0: the request itself then reports the timeout."""
        return max(self._deadline - time.monotonic(), 0.01)

    def _run(self, requests: Sequence[Any]) -> Future[Any]:
        async def gather() -> None:
            await asyncio.gather(*requests)

        return self.loop.submit(gather())


def type_of(error: RolloutError) -> type[RolloutError]:
    """Class to raise again with more words: an outage may pass, anything else will not."""
    return EngineOutage if isinstance(error, EngineOutage) else RolloutError
