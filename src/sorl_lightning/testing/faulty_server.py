"""An HTTP server in a thread, whose answers go wrong on request."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from typing_extensions import Self

from sorl_lightning.rollout.event_loop import EventLoopThread

JSON = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with a request, instead of or after its answer.

    Attributes:
        status: answered with ``text`` in place of the real answer.
        hang: seconds before anything is answered.
        change: makes another answer of the real one.
    """

    status: int | None = None
    text: str = "broken on request"
    hang: float = 0.0
    change: Callable[[JSON], Any] | None = None


class FaultyServer:
    """A context manager: the server runs inside it, at ``url``.

    A coroutine method answers a request: ``_post_v1_completions`` those of POST /v1/completions. It is given the body
    and returns that of the answer.

    Attributes:
        requests: route and body of every request, in order.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, JSON]] = []
        self.url = ""
        self._faults: dict[str, list[Fault]] = defaultdict(list)
        self._loop = EventLoopThread()
        self._threads = ThreadPoolExecutor(4)

    def fail(self, route: str, times: int = 1, **fault: Any) -> None:
        """Have the next ``times`` requests of ``route`` go wrong, as the attributes of ``Fault`` say."""
        self._faults[route] += [Fault(**fault)] * times

    def has(self, route: str) -> bool:
        """Whether there is such a route, for another method than the one that was asked for."""
        return False

    def __enter__(self) -> Self:
        self._loop.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._runner.cleanup())
        self._loop.close()
        self._threads.shutdown(wait=False)

    async def _start(self) -> None:
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{route:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        route = request.path
        body = await request.json() if request.can_read_body else {}
        self.requests.append((route, body))
        fault = self._faults[route].pop(0) if self._faults[route] else Fault()
        await asyncio.sleep(fault.hang)
        if fault.status is not None:
            return failure(fault.status, fault.text)
        method = getattr(self, f"_{request.method.lower()}_{route.strip('/').replace('/', '_')}", None)
        if method is None:
            return failure(405, "Method Not Allowed") if self.has(route) else failure(404, "Not Found")
        try:
            answer = await method(body)
        except web.HTTPException as error:
            return failure(error.status, error.text or "")
        except Exception as error:
            return failure(500, f"{type(error).__name__}: {error}")
        return web.json_response(fault.change(answer) if fault.change else answer, dumps=json.dumps)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def failure(status: int, text: str) -> web.Response:
    """An error in vLLM's form."""
    return web.json_response({"error": {"message": text, "code": status}}, status=status)
