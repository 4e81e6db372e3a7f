"""One or several servers that hold the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.rollout.vllm.client import Client, ServerError
from sorl_lightning.rollout.vllm.wire import ROUTE, TIMEOUT, Answer, Server, body, inspect, parse


class Fleet:
    """Connections to servers, in an event loop of their own: used from the training thread and from any loop alike.

    Args:
        urls: addresses.
        model: name under which all serve the policy.
        asked: name that turns ask for: the model's, or that of adapters on it.
        concurrency: most turns in flight, for each server.
        request_timeout: seconds that a turn may take.
        attempts: times that a turn is asked for.
    """

    def __init__(
        self, urls: Sequence[str], model: str, asked: str, concurrency: int, request_timeout: float, attempts: int
    ) -> None:
        self.urls = urls
        self.model = model
        self.asked = asked
        self.concurrency = concurrency
        self.request_timeout = request_timeout
        self.attempts = attempts
        self.loop = EventLoopThread()
        self.servers: list[Server] = []
        self._clients: list[Client] = []

    def meet(self, timeout: float) -> None:
        """Wait until all servers are up; the first time, ask each what it can do.

        Raises:
            ConfigurationError: one cannot do what is asked of it.
            EngineOutage: one is not up within ``timeout`` seconds.
        """
        self.loop.run(self._meet(timeout))

    async def _meet(self, timeout: float) -> None:
        if not self._clients:
            self._clients = [Client(url, self.concurrency) for url in self.urls]
        await asyncio.gather(*(client.wait_until_healthy(timeout) for client in self._clients))
        if not self.servers:
            self.servers = list(await asyncio.gather(*(inspect(client, self.model) for client in self._clients)))

    def post(self, route: str, timeout: float) -> Future[None]:
        """Ask every server the same."""

        async def ask() -> None:
            await asyncio.gather(*(client.post(route, None, timeout) for client in self._clients))

        return self.loop.submit(ask())

    def holds(self, name: str) -> bool:
        """Whether all servers hold the weights ``name``: a server that was restarted does not."""

        async def ask() -> list[dict[str, Any]]:
            return await asyncio.gather(*(client.get("/weight_info", TIMEOUT) for client in self._clients))

        return all(answer.get("weight_version") == name for answer in self.loop.run(ask()))

    async def turn(self, server: Server, request: GenerationRequest, name: str, probe: bool = False) -> Answer:
        """One turn by the weights ``name``, or by what came after them; with the prompt's scores for a probe, unless
        adapters are asked."""

        async def ask() -> Answer:
            # Prompts of adapters are left out: beside other turns vLLM 0.32 takes one adapter index for many tokens.
            scored = probe and self.asked == self.model
            question = body(server, self.asked, request, salt=name, prompt_logprobs=scored)
            answer = await self._ask(server, question, request.max_tokens)
            if answer.versions is not None:
                return answer
            held = await server.client.get("/weight_info", TIMEOUT)
            # Where the answer does not say, tokens count as old as the request: weights may have changed since.
            known = name if held.get("weight_version", "").startswith(name.partition(":")[0]) else "unknown"
            return replace(answer, versions=(known,) * len(answer.token_ids))

        return await asyncio.wrap_future(self.loop.submit(ask()))

    async def _ask(self, server: Server, question: dict[str, Any], max_tokens: int) -> Answer:
        try:
            return await server.client.retried(
                ROUTE[server.route],
                question,
                lambda received: parse(server, received, max_tokens),
                self.request_timeout,
                self.attempts,
            )
        except ServerError as error:
            if error.status != 404:
                raise
            # It had what is asked for when weights came, so it was started again since.
            raise EngineOutage(str(error)) from error

    def close(self) -> None:
        """Close connections and loop. Safe to call twice."""

        async def close() -> None:
            await asyncio.gather(*(client.close() for client in self._clients))

        if self._clients:
            self.loop.run(close())
        self.loop.close()
        self._clients, self.servers = [], []


def share_of(urls: Sequence[str] | None) -> Sequence[str]:
    """This rank's share of the servers.

    Raises:
        ConfigurationError: there is none for it.
    """
    if not urls:
        raise ConfigurationError(
            "VLLMEngine has no servers: set its urls, or add the callback VLLMSidecar, which starts one"
        )
    if len(urls) < ranks.count():
        raise ConfigurationError(
            f"VLLMEngine.urls names {len(urls)} servers for {ranks.count()} ranks, and each needs its own"
        )
    return urls[ranks.index() :: ranks.count()]
