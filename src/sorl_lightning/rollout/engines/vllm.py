"""Generate with vLLM servers, over HTTP: tokens in, tokens out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning import ranks
from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.vllm.fleet import Fleet, share_of
from sorl_lightning.rollout.vllm.probe import compare
from sorl_lightning.rollout.vllm.transports import DiskTransport, WeightTransport
from sorl_lightning.rollout.vllm.weight_push import InFlight, WeightPush
from sorl_lightning.rollout.vllm.wire import Server
from sorl_lightning.types import Completion

MEGABYTE = 2**20


class VLLMEngine(RolloutEngine):
    """Generates with one or several vLLM servers that hold a copy of the policy each.

    A request draws from its own seed, so its tokens depend on its company by float rounding only. The server says for
    every token which weights sampled it; a token of weights that this engine has not pushed is never returned. At
    temperature 0 the reported log-probabilities are those at temperature 1.

    Args:
        urls: addresses of the servers; None: those that the callback VLLMSidecar starts. A trajectory stays with one.
            Several ranks share them out, so that each has servers of its own.
        model: name under which the servers serve the policy.
        transport: how weights travel; None is a DiskTransport. An AdapterTransport takes a LoRA's adapters alone.
        in_flight: turns that are being generated when new weights come are frozen and go on with them ("keep") or are
            waited for ("wait").
        concurrency: most requests in flight, for each server; further ones wait their turn.
        request_timeout: seconds that a turn may take.
        attempts: times that a turn is asked for before the server counts as lost.
        push_timeout: seconds that new weights may take.
        outage_timeout: seconds that a server may be away, at the start and between pushes.
        bucket_megabytes: weights that travel, and are held besides the model, at a time.
        probe_every: trainer and servers score a fixed sequence after the first push and every so many; 0: never.
        probe_tolerance: largest difference of log-probabilities at which the run goes on, nats.
        sleep: have the servers give their memory back while nothing is generated, for a GPU shared with the trainer;
            they must have been started with --enable-sleep-mode.

    Attributes:
        sidecar: address of the server that VLLMSidecar has started for this rank; None without one.
        figures: of the last push, to be logged: engine/push_seconds, engine/probe_difference.
    """

    def __init__(
        self,
        urls: Sequence[str] | None = None,
        model: str = "policy",
        transport: WeightTransport | None = None,
        in_flight: InFlight = "keep",
        concurrency: int = 256,
        request_timeout: float = 600.0,
        attempts: int = 5,
        push_timeout: float = 300.0,
        outage_timeout: float = 120.0,
        bucket_megabytes: int = 256,
        probe_every: int = 20,
        probe_tolerance: float = 1e-3,
        sleep: bool = False,
    ) -> None:
        for name, value in (
            ("concurrency", concurrency),
            ("attempts", attempts),
            ("bucket_megabytes", bucket_megabytes),
        ):
            if value < 1:
                raise ConfigurationError(f"VLLMEngine.{name} must be at least 1, got {value}")
        for name, seconds in (("request_timeout", request_timeout), ("push_timeout", push_timeout)):
            if not seconds > 0:
                raise ConfigurationError(f"VLLMEngine.{name} must be above 0 seconds, got {seconds}")
        self.urls = urls
        self.model = model
        self.transport = transport if transport is not None else DiskTransport()
        self.in_flight = in_flight
        self.concurrency = concurrency
        self.request_timeout = request_timeout
        self.attempts = attempts
        self.push_timeout = push_timeout
        self.outage_timeout = outage_timeout
        self.bucket_megabytes = bucket_megabytes
        self.probe_every = probe_every
        self.probe_tolerance = probe_tolerance
        self.sleep = sleep
        self.sidecar: str | None = None
        self.figures: dict[str, float] = {}
        self._fleet: Fleet | None = None
        self._push: WeightPush | None = None
        self._policy: PreTrainedModel | None = None
        self._version: int | None = None
        self._pushes = 0
        # Versions are numbers, and a server may have been pushed to by another run: names of weights begin with this.
        self._run = secrets.token_hex(4)
        self._places: dict[TrajectoryKey, int] = {}
        self._asleep: Future[Any] | None = None

    def attach(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Keep the policy, which scores the probe; servers are met when the first weights come."""
        self._policy = policy
        self._pushes = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push weights to every server. Until that has succeeded, no turn is generated.

        Raises:
            ConfigurationError: a server cannot do what is asked of it.
            EngineOutage: a server failed or did not answer in time.
            RolloutError: a server refused, or computes something else than the trainer.
        """
        if self._policy is None:
            raise RuntimeError("VLLMEngine is not attached to a policy; call attach first")
        arriving = self.transport.select(self._policy, weights)
        ranks.together(lambda: self._send(arriving, version))  # no rank may probe, a pass of all ranks, alone
        self._pushes += 1
        if self.probe_every and (self._pushes - 1) % self.probe_every == 0:
            assert self._fleet is not None
            difference = compare(self._policy, self._fleet, self._name(version), self.probe_tolerance)
            self.figures["engine/probe_difference"] = difference
        self._version = version

    def check_streaming(self) -> None:
        """Servers that sleep while nothing is generated cannot generate while the policy is trained.

        Raises:
            ConfigurationError: ``sleep`` is set.
        """
        if self.sleep:
            raise ConfigurationError(
                "VLLMEngine.sleep=true gives the GPU to training between collections, and data.max_staleness above 0 "
                "generates meanwhile: set sleep to false or data.max_staleness to 0"
            )

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        held, self._version = self._version, None
        try:
            fleet, push = self._connected()
            if self._asleep is not None:
                self._asleep.result()
                self._asleep = fleet.post("/wake_up", self.push_timeout).result()
            if held is not None and not fleet.holds(self._name(held)):
                push.start_over()
            start = time.perf_counter()
            push.push(weights, self._name(version))
            self.figures["engine/push_seconds"] = time.perf_counter() - start
        except (ConfigurationError, RolloutError):
            for _ in weights:
                pass  # the other ranks take part in gathering each of them, and would wait
            raise

    def _connected(self) -> tuple[Fleet, WeightPush]:
        """Healthy servers, and the way of weights to them."""
        if self._fleet is None:
            own = share_of(self.urls) if self.sidecar is None else [self.sidecar]
            asked = self.transport.served_as(self.model)
            self._fleet = Fleet(own, self.model, asked, self.concurrency, self.request_timeout, self.attempts)
        fleet = self._fleet
        fleet.meet(self.outage_timeout)
        if self._push is None:
            for server in fleet.servers:
                self.transport.check(server)
            size = self.bucket_megabytes * MEGABYTE
            self._push = WeightPush(fleet.servers, fleet.loop, self.transport, self.in_flight, self.push_timeout, size)
        return fleet, self._push

    def _name(self, version: int) -> str:
        return f"{self._run}:{version}"

    def open(self, trajectory: TrajectoryKey) -> None:
        """Choose the server with the fewest trajectories; it keeps the trajectory's prefixes in its cache.

        Raises:
            RuntimeError: it is open already.
        """
        if trajectory in self._places:
            raise RuntimeError(f"{trajectory} is open already; release it first")
        held = list(self._places.values())
        servers = len(self._fleet.servers) if self._fleet is not None else 1
        self._places[trajectory] = min(range(servers), key=held.count)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn.

        Raises:
            ConfigurationError: prompt and turn do not fit in the server's context.
            EngineOutage: the server is lost, or has come back without the weights.
            RolloutError: the server refused, or gave something that is no turn.
            RuntimeError: there are no weights, or the trajectory is not open.
        """
        if self._version is None or self._fleet is None:
            raise RuntimeError("VLLMEngine has no weights; call load_weights first")
        if request.trajectory not in self._places:
            raise RuntimeError(f"{request.trajectory} is not open; open it before its first request")
        server = self._fleet.servers[self._places[request.trajectory]]
        if len(request.prompt_ids) + request.max_tokens > server.context_limit:
            raise ConfigurationError(
                f"{request.trajectory}: a prompt of {len(request.prompt_ids)} tokens and max_tokens="
                f"{request.max_tokens} exceed the context of {server.client.url}, --max-model-len "
                f"{server.context_limit}; lower data.context_limit"
            )
        answer = await self._fleet.turn(server, request, self._name(self._version))
        return Completion(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            policy_version=tuple(self._number(name, server) for name in answer.versions or ()),
        )

    def _number(self, name: str, server: Server) -> int:
        """The version in the name of weights that this engine has pushed."""
        run, _, number = name.partition(":")
        if run != self._run:
            raise EngineOutage(
                f"{server.client.url} sampled with weights {name!r}, which this run has not pushed: it was restarted, "
                "or somebody else pushes to it"
            )
        return int(number)

    def release(self, trajectory: TrajectoryKey) -> None:
        """Forget the trajectory. One that is not open is ignored."""
        self._places.pop(trajectory, None)
        if self.sleep and not self._places and self._fleet is not None and self._asleep is None:
            # Level 2 gives up the weights too: new ones come before the next turn.
            self._asleep = self._fleet.post("/sleep?level=2", self.push_timeout)

    def close(self) -> None:
        """Close the connections; turns still waited for are cancelled. The servers run on."""
        if self._fleet is not None:
            self._fleet.close()
        self.transport.close()
        self._fleet = self._push = self._version = self._asleep = None
        self._places.clear()
