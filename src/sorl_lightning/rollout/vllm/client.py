"""HTTP to one vLLM server, with its errors in its own words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError

try:
    import aiohttp
    import tenacity
except ModuleNotFoundError as missing:  # of the extra "vllm"; the rest of the package does without
    MISSING: str | None = missing.name
else:
    MISSING = None

T = TypeVar("T")
RETRIED = {429, 500, 502, 503, 504}  # the request was fine; the server was busy, starting, or broke down
SHOWN = 600  # characters of a server's answer that an error shows


class ServerError(RolloutError):
    """A vLLM server refused a request; asking again will not help. The message holds the server's text.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Connections to one server. Lives in one event loop.

    Args:
        url: base address, without a path.
        concurrency: most requests for turns in flight.

    Raises:
        ConfigurationError: a package is not installed.
    """

    def __init__(self, url: str, concurrency: int = 256) -> None:
        if MISSING is not None:
            raise ConfigurationError(f"VLLMEngine needs {MISSING}: pip install 'sorl-lightning[vllm]'")
        self.url = url.rstrip("/")
        self.concurrency = concurrency
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._slots = asyncio.Semaphore(concurrency)

    async def post(self, route: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        """The server's answer to one request.

        Raises:
            EngineOutage: no answer within ``timeout`` seconds, or one that says the server is not well.
            ServerError: the server refuses the request.
        """
        return await self._ask("POST", route, body, timeout)

    async def get(self, route: str, timeout: float) -> dict[str, Any]:
        """The same for a request without a body."""
        return await self._ask("GET", route, None, timeout)

    async def retried(
        self, route: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T], timeout: float, attempts: int
    ) -> T:
        """What ``read`` makes of an answer; waits for a slot, and asks again, after a random and growing time, where
        that may help: after an ``EngineOutage`` of ``post`` or of ``read``.

        For requests that may be repeated: a seeded turn is the same turn each time.
        """
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=10),
            retry=tenacity.retry_if_exception_type(EngineOutage),
            reraise=True,
        )

        async def ask() -> T:
            return read(await self._ask("POST", route, body, timeout, kept=True))

        async with self._slots:
            return await retrying(ask)

    async def wait_until_healthy(self, timeout: float) -> None:
        """Return as soon as the server is up.

        Raises:
            EngineOutage: it is not within ``timeout`` seconds.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                await self.get("/health", timeout=5.0)
                return
            except EngineOutage as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineOutage(f"{self.url} was not healthy within {timeout:g} s: {error}") from error
            await asyncio.sleep(0.25)

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    def _session(self, kept: bool) -> aiohttp.ClientSession:
        """Connections that are kept for further requests, or not.

        vLLM closes a connection after an error, which the next request on it may not have noticed: only requests that
        are repeated go over kept ones. The operating system's proxy is not asked.
        """
        if kept not in self._sessions:
            connector = aiohttp.TCPConnector(limit=0, force_close=not kept)
            self._sessions[kept] = aiohttp.ClientSession(connector=connector)
        return self._sessions[kept]

    async def _ask(
        self, method: str, route: str, body: dict[str, Any] | None, timeout: float, kept: bool = False
    ) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session(kept).request(method, self.url + route, json=body, timeout=limit) as response:
                text = await response.text()
        except asyncio.TimeoutError:
            raise EngineOutage(f"{self.url} did not answer {route} within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineOutage(f"{self.url} cannot be reached for {route}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            message = f"{self.url} answered {response.status} to {route}: {words(text)}"
            raise EngineOutage(message) if response.status in RETRIED else ServerError(message, response.status)
        if not text or "Content-Type" not in response.headers:
            return {"answer": text}  # vLLM's bare words of success
        try:
            answer = json.loads(text)
        except ValueError:
            raise EngineOutage(f"{self.url} answered {route} with no JSON: {text[:SHOWN]!r}") from None
        return answer if isinstance(answer, dict) else {"answer": answer}


def words(text: str) -> str:
    """The sentence in an error's body, wherever vLLM has put it."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:SHOWN].strip() or "(no text)"
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        body = error.get("message", error) if isinstance(error, dict) else error
    return str(body)[:SHOWN]
