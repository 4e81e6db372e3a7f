"""Trajectories of a simulated run and the servers that decode them, in virtual time."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import math
import random
from dataclasses import dataclass

from benchmarks.costs import Costs
from benchmarks.simulated import SimulatedEngine, one_token, position_of

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey, derive_seed
from sorl_lightning.types import Completion


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated and trained; all of it assumed.

    Attributes:
        quota: groups of a collection; siblings: trajectories of a group. Both are the product's defaults.
        turns: of a trajectory: the least and the most; every number between is as likely.
        median: tokens of a turn; sigma: of its logarithm, 0 makes all turns equally long; most: tokens of a turn.
        prompt: tokens before the first turn; observation: tokens of each answer of the environment.
        step_seconds: of the environment, for each turn.
    """

    quota: int = 16
    siblings: int = 8
    turns: tuple[int, int] = (1, 5)
    median: float = 200.0
    sigma: float = 0.8
    most: float = 2048.0
    prompt: float = 512.0
    observation: float = 256.0
    step_seconds: float = 0.5


class Lengths:
    """How long the trajectories of a run are: a function of seed, task, sibling and turn, whatever happens when."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.seed = seed
        self.trajectory = functools.lru_cache(maxsize=None)(self._trajectory)

    def turns(self, position: int) -> int:
        """Turns of a task's trajectories."""
        return random.Random(derive_seed(self.seed, "turns", position)).randint(*self.load.turns)

    def _trajectory(self, position: int, sibling: int) -> tuple[float, ...]:
        """Tokens that each turn generates."""
        chance = random.Random(derive_seed(self.seed, "tokens", position, sibling))
        load = self.load
        turns = [load.median * math.exp(load.sigma * chance.gauss(0, 1)) for _ in range(self.turns(position))]
        return tuple(min(tokens, load.most) for tokens in turns)

    def tokens(self, position: int, sibling: int) -> tuple[float, float]:
        """Of a trajectory: those generated, and all."""
        turns = self.trajectory(position, sibling)
        generated = sum(turns)
        return generated, generated + self.load.prompt + self.load.observation * (len(turns) - 1)


class Equal(Lengths):
    """All trajectories are alike: as long as another run's are on the average."""

    def __init__(self, other: Lengths, positions: int) -> None:
        super().__init__(other.load, other.seed)
        numbers = [other.turns(position) for position in range(positions)]
        siblings = range(other.load.siblings)
        generated = [other.tokens(p, s)[0] for p, s in itertools.product(range(positions), siblings)]
        self._turns = max(1, round(sum(numbers) / positions))
        self._each = sum(generated) / len(generated) / self._turns

    def turns(self, position: int) -> int:
        return self._turns

    def _trajectory(self, position: int, sibling: int) -> tuple[float, ...]:
        return (self._each,) * self._turns


class Server:
    """Decodes all its requests together: a step gives each a token. Prefill and pushes of weights stop them all.

    Attributes:
        busy: seconds with requests, without those of pushes; token_seconds: the sum of requests over these.
        peak: most tokens in its cache.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.busy = self.request_seconds = self.peak = 0.0
        self._requests: list[tuple[float, int, float, asyncio.Future[None]]] = []  # by the progress at which they end
        self._progress = 0.0  # tokens of a request that has been there from the beginning
        self._backlog = self._context = self._now = 0.0
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, fresh: float, context: float, tokens: float) -> None:
        """Read ``fresh`` tokens, then generate ``tokens``, with ``context`` in the cache on the average."""
        self._advance()
        self._backlog += self.costs.prefill(fresh)
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._requests, (self._progress + tokens, next(self._numbers), context, done))
        self._context += context
        self.peak = max(self.peak, self._context)
        self._plan()
        await done

    def stop_for(self, seconds: float) -> None:
        """Stand still."""
        self._advance()
        self._backlog += seconds
        if self._requests:
            self.busy -= seconds
            self.request_seconds -= seconds * len(self._requests)
            self._plan()

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed, self._now = now - self._now, now
        stopped = min(elapsed, self._backlog)
        self._backlog -= stopped
        if self._requests:
            self._progress += (elapsed - stopped) / self.costs.step(len(self._requests), self._context)
            self.busy += elapsed
            self.request_seconds += elapsed * len(self._requests)

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = max(self._requests[0][0] - self._progress, 0.0)
        seconds = self._backlog + left * self.costs.step(len(self._requests), self._context)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._finish)

    def _finish(self) -> None:
        self._advance()
        self._timer = None
        while self._requests and self._requests[0][0] <= self._progress + 1e-6:
            _, _, context, done = heapq.heappop(self._requests)
            self._context -= context
            done.set_result(None)
        if self._requests:
            self._plan()


class Servers(SimulatedEngine):
    """One server a GPU; a trajectory stays with that which had the fewest when it was opened, as with VLLMEngine."""

    def __init__(self, costs: Costs, lengths: Lengths, gpus: int) -> None:
        self.lengths = lengths
        self.servers = [Server(costs) for _ in range(gpus)]
        self._places: dict[TrajectoryKey, int] = {}
        self._held = [0] * gpus
        self._said: dict[TrajectoryKey, list[float]] = {}  # tokens of the turns so far

    def open(self, trajectory: TrajectoryKey) -> None:
        self._places[trajectory] = place = self._held.index(min(self._held))
        self._held[place] += 1
        self._said[trajectory] = []

    def release(self, trajectory: TrajectoryKey) -> None:
        if trajectory in self._places:
            self._held[self._places.pop(trajectory)] -= 1
            del self._said[trajectory]

    async def stop_for(self, seconds: float) -> None:
        for server in self.servers:
            server.stop_for(seconds)
        await asyncio.sleep(seconds)

    async def generate(self, request: GenerationRequest) -> Completion:
        key, load, version = request.trajectory, self.lengths.load, self.version
        said = self._said[key]
        tokens = self.lengths.trajectory(position_of(key), key.sibling)[len(said)]
        fresh = load.observation if said else load.prompt
        context = load.prompt + load.observation * len(said) + sum(said) + tokens / 2
        said.append(tokens)
        await self.servers[self._places[key]].serve(fresh, context, tokens)
        return one_token(version)
