"""The pool in virtual time: who is trained when, to the second; books that can be handed on."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.streaming import LOADS, measure, shares

from doubles import Countdown, ScriptedEngine
from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.rollout.collector import Collection, Collector, EnvironmentFailure, Sampling
from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines import ExpertEngine, LocalEngine, RandomEngine, VLLMEngine
from sorl_lightning.rollout.gate import Gate, check_streaming
from sorl_lightning.rollout.pool import GroupPool
from sorl_lightning.rollout.stream_figures import StreamFigures
from sorl_lightning.rollout.trajectory_records import record_of, trajectory_of
from sorl_lightning.testing.virtual_time import run_in_virtual_time
from sorl_lightning.types import Task


class Timed(ScriptedEngine):
    """A turn of a task takes ``seconds`` of its position, and is of the weights that are there when it ends."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.seconds = seconds

    async def generate(self, request: GenerationRequest) -> Any:
        await asyncio.sleep(self.seconds(-1 - request.trajectory.task))
        return await super().generate(request)


class Run:
    """Trains collections, each for ``training`` seconds, and notes what they were made of."""

    def __init__(self, chat, engine, staleness, quota=2, environment=None, end=None, first=0) -> None:
        self.engine, self.gate = engine, Gate(engine)
        self.pool = GroupPool(self.gate, quota, staleness, first, first * quota)
        sampling = Sampling(max_tokens=4, context_limit=128, temperature=1.0)
        world = environment or Countdown()
        self.collector = Collector(world, self.gate, chat, sampling, group_size=2, retries=0)
        self.end = end
        self.collections: list[Collection] = []

    async def start(self, max_turns: int = 4) -> None:
        pool = self.pool
        await self.gate.hold()
        self.engine.load_weights((), pool.collection)
        await pool.loaded(pool.collection)
        await self.gate.free()
        room = pool.room(None if self.end is None else self.end - pool.collection)
        tasks = {p: task_at(p) for p in range(pool.drawn, pool.drawn + room)}
        await pool.advance(self.collector, tasks, max_turns, 0, pool.drawn + room)

    async def train(self, collections: int, training: float = 0.0, max_turns: int = 4) -> None:
        for _ in range(collections):
            await self.start(max_turns)
            await self.pool.ready()
            self.collections.append(await self.pool.take(self.pool.collection))
            await asyncio.sleep(training)

    @property
    def groups(self) -> list[list[int]]:
        return [sorted({t.group for t in collection.trajectories}) for collection in self.collections]


def task_at(position: int) -> Task:
    return Task(id=f"train-{position}", payload=1)


def test_the_bound_holds_and_others_do_not_wait(chat) -> None:
    """Task 0 takes 10 seconds, all others half a second; a collection of 2 trains for 1; staleness is at most 2."""
    run = Run(chat, Timed(lambda position: 10.0 if position == 0 else 0.5), staleness=2, end=5)

    async def play() -> float:
        await run.train(5, training=1.0)
        return asyncio.get_running_loop().time()

    seconds = run_in_virtual_time(play())
    # Collection 2 must train task 0, which then is two collections old, and waits for it from second 2.5 to 10.
    assert run.groups == [[1, 2], [3, 4], [0, 5], [6, 7], [8, 9]]
    streams = [collection.stream for collection in run.collections]
    assert [s.stalled for s in streams] == [0.0, 0.0, 7.5, 0.0, 0.0]
    assert [s.waited for s in streams] == [0.5, 0.0, 7.5, 0.0, 0.0]
    assert [s.outstanding for s in streams] == [4, 4, 4, 2, 0]
    assert [s.carried for s in streams] == [1, 3, 0, 0, 0]
    assert [s.staleness_max for s in streams] == [0, 1, 2, 2, 2]
    assert seconds == 0.5 + 1 + 1 + 7.5 + 1 + 1 + 1
    assert [collection.seconds for collection in run.collections] == [0.5, 1.0, 8.5, 1.0, 1.0]


def test_overlap_halves_the_time(chat) -> None:
    run = Run(chat, Timed(lambda position: 3.0), staleness=1, end=20)

    async def play() -> float:
        await run.train(20, training=3.0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == 3.0 * 21
    assert run.groups == [[2 * k, 2 * k + 1] for k in range(20)]


def test_a_turn_in_flight_goes_on_and_its_trajectory_is_as_old_as_its_oldest_token(chat) -> None:
    class Kept(Timed):
        """Two tokens a turn, of the weights at its beginning and at its end."""

        async def generate(self, request):
            start = self.version
            completion = await super().generate(request)
            tokens = completion.token_ids[:2]
            return dataclasses.replace(
                completion, token_ids=tokens, logprobs=(-1.0, -1.0), policy_version=(start, self.version)
            )

    run = Run(chat, Kept(lambda position: 2.2 if position == 0 else 0.5), staleness=2)
    run_in_virtual_time(run.train(3, training=1.0))
    versions = {t.group: t.turns[0].completion.policy_version for t in run.collections[-1].trajectories}
    assert versions == {0: (0, 1), 5: (0, 0)}
    assert run.collections[-1].stream.metrics["staleness"] == 2.0


def test_a_group_keeps_the_limit_under_which_it_started(chat) -> None:
    class Long(Countdown):
        def reset(self, task):
            opening = super().reset(task)
            self.left = 100
            return opening

    run = Run(chat, Timed(lambda position: 1.0), staleness=1, environment=Long())

    async def play() -> None:
        for limit in (3, 2, 4):
            await run.train(1, max_turns=limit)

    run_in_virtual_time(play())
    limits = [{(t.started, t.turn_limit, len(t.turns)) for t in c.trajectories} for c in run.collections]
    assert limits == [{(0, 3, 3)}, {(0, 3, 3)}, {(1, 2, 2)}]


def test_an_outage_restarts_what_was_played_and_keeps_what_had_finished(chat) -> None:
    class Lost(Timed):
        lost = False

        async def generate(self, request):
            completion = await super().generate(request)
            if request.trajectory.task == -1 - 3 and not self.lost:
                self.lost = True
                raise EngineOutage("gone")
            return completion

    engine = Lost(lambda position: 1.0 + position)
    run = Run(chat, engine, staleness=1, end=4)

    async def play() -> None:
        await run.train(1, training=10.0)  # groups 0 and 1; 2 finishes while they train, and 3 is lost
        assert not engine.live
        await run.train(3)

    run_in_virtual_time(play())
    assert run.groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [c.stream.restarted for c in run.collections] == [0, 1, 0, 0]
    assert {t.started for t in run.collections[1].trajectories} == {0, 1}


def test_an_outage_that_is_waited_for_is_raised_and_the_next_attempt_goes_on(chat) -> None:
    class Lost(Timed):
        lost = False

        async def generate(self, request):
            if not self.lost:
                self.lost = True
                raise EngineOutage("gone")
            return await super().generate(request)

    run = Run(chat, Lost(lambda position: 1.0), staleness=1)

    async def play() -> None:
        with pytest.raises(EngineOutage, match="gone"):
            await run.train(1)
        assert run.collections == []
        await run.train(2)

    run_in_virtual_time(play())
    assert run.groups == [[0, 1], [2, 3]]
    assert run.collections[0].stream.restarted == 4


def test_any_other_error_is_raised_as_it_is(chat) -> None:
    class Odd(Timed):
        async def generate(self, request):
            raise ZeroDivisionError

    run = Run(chat, Odd(lambda position: 1.0), staleness=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run_in_virtual_time(run.train(1))


def saved(chat, staleness: int = 2, quota: int = 2) -> tuple[Run, dict[str, Any]]:
    """A run after its first collection, when every third group has finished; and what it saves."""
    run = Run(chat, Timed(lambda position: 1.0 if position % 3 else 100.0), staleness, quota)

    async def play() -> dict[str, Any]:
        await run.train(1, training=2.0)
        state = await run.pool.state()
        await run.pool.suspend()
        return state

    return run, run_in_virtual_time(play())


def test_what_is_saved_is_trained_by_whoever_goes_on(chat) -> None:
    before, state = saved(chat)
    assert before.groups == [[1, 2]]
    assert [("trajectories" in g, g["position"]) for g in state["groups"]] == [
        (False, 0), (False, 3), (True, 4), (True, 5),
    ]  # fmt: skip
    after = Run(chat, Timed(lambda position: 1.0), staleness=2, first=1)
    after.pool.drawn = state["drawn"]
    after.pool.restore([state], slice(0, None, 1), task_at)
    kept = before.pool.started[4].outcome
    assert after.pool.started[4].outcome == kept
    run_in_virtual_time(after.train(3, training=2.0))
    assert after.groups == [[4, 5], [0, 3], [6, 7]]
    assert after.collections[0].trajectories[:2] == kept
    assert [c.stream.restarted for c in after.collections] == [2, 0, 0]
    assert [c.stream.staleness_max for c in after.collections] == [1, 1, 2]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_out_what_was_saved_by_any_number_of_them(chat, world) -> None:
    states = [saved(chat)[1] for _ in range(2)]
    for offset, state in enumerate(states):
        for group in state["groups"]:
            group["position"] = 2 * group["position"] + offset
            group["task"] = f"train-{group['position']}"
    positions = []
    for rank in range(world):
        pool = GroupPool(Gate(ScriptedEngine()), 4 // world, 2, 1, 12)
        pool.restore(states, slice(rank, None, world), task_at)
        assert len(pool.started) == 8 // world
        positions += pool.started
    assert sorted(positions) == sorted(group["position"] for state in states for group in state["groups"])


def test_a_smaller_bound_refuses_what_it_could_not_train_in_time(chat) -> None:
    _, state = saved(chat)
    with pytest.raises(ConfigurationError, match=r"4 groups .* too many for data\.max_staleness=1"):
        GroupPool(Gate(ScriptedEngine()), 2, 1, 1, 6).restore([state], slice(0, None, 1), task_at)
    pool = GroupPool(Gate(ScriptedEngine()), 2, 2, 1, 6)
    with pytest.raises(ConfigurationError, match=r"holds a group of task 'train-0' .* now give task 'other'"):
        pool.restore([state], slice(0, None, 1), lambda position: Task(id="other"))


def test_a_failure_is_saved_too(chat) -> None:
    def fails(task, attempt, text=""):
        if task.id == "train-3":
            raise OSError("broken")

    run = Run(chat, Timed(lambda position: 1.0), staleness=1, environment=Countdown(fails=fails))

    async def play() -> dict[str, Any]:
        await run.train(1, training=5.0)
        return await run.pool.state()

    state = run_in_virtual_time(play())
    again = GroupPool(Gate(ScriptedEngine()), 2, 1, 1, 4)
    again.restore([state], slice(0, None, 1), task_at)
    failure = again.started[3].outcome
    assert isinstance(failure, EnvironmentFailure)
    assert "broken" in str(failure)


def test_records_give_back_the_trajectory(chat) -> None:
    run = Run(chat, ScriptedEngine(), staleness=1, environment=Countdown())

    async def play() -> Collection:
        tasks = [Task(id=str(n), payload=n) for n in (1, 4)]
        return await run.collector.collect(tasks, 3, 7)

    for trajectory in run_in_virtual_time(play()).trajectories:
        record = record_of(trajectory)
        assert trajectory_of(record, trajectory.task) == trajectory
        kept = sum(len(turn["prompt_ids"]) for turn in record["turns"])
        last = trajectory.turns[-1]
        generated = sum(len(turn.completion.token_ids) for turn in trajectory.turns[:-1])
        assert kept == len(last.prompt_ids) - generated  # no prompt is written twice


def test_a_gate_holds_new_turns_and_keeps_keys_apart() -> None:
    engine = ScriptedEngine(delay=1.0)
    gate, key = Gate(engine), TrajectoryKey(0, 1)
    request = GenerationRequest(
        trajectory=key, prompt_ids=(1,), max_tokens=2, stop_token_ids=(2,), temperature=1.0, seed=0,
        environment=Countdown(),
    )  # fmt: skip

    async def play() -> None:
        gate.open(key)
        engine.open(key)  # an evaluation's
        await gate.hold()
        turn = asyncio.ensure_future(gate.generate(request))
        await asyncio.sleep(5.0)
        assert engine.requests == []
        await gate.free()
        await turn
        assert asyncio.get_running_loop().time() == 6.0
        assert [r.trajectory for r in engine.requests] == [TrajectoryKey(-1, 1)]
        gate.close()
        gate.release(key)
        assert engine.live == {key}

    run_in_virtual_time(play())


def test_who_can_stream() -> None:
    for engine in (LocalEngine(), ExpertEngine(), RandomEngine(), VLLMEngine(urls=["http://127.0.0.1:1"])):
        check_streaming(engine)
    with pytest.raises(ConfigurationError, match=r"VLLMEngine\.sleep=true"):
        check_streaming(VLLMEngine(urls=["http://127.0.0.1:1"], sleep=True))


def test_figures_of_ranks_add() -> None:
    one = StreamFigures(trajectories=2, staleness_sum=3.0, staleness_max=2, waited=1.0, stalled=0.0, carried=1,
                        outstanding=3, restarted=0)  # fmt: skip
    other = StreamFigures(trajectories=2, staleness_sum=1.0, staleness_max=1, waited=4.0, stalled=2.0, carried=2,
                          outstanding=3, restarted=1)  # fmt: skip
    assert (one + other).metrics == {
        "staleness": 1.0, "staleness_max": 2.0, "wait_seconds": 4.0, "stall_seconds": 2.0, "stalls": 1.0,
        "carried_groups": 3.0, "outstanding_groups": 6.0, "restarted_groups": 1.0,
    }  # fmt: skip


def test_virtual_time_says_when_nothing_can_happen() -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer will bring"):
        run_in_virtual_time(for_ever())
    assert math.isclose(run_in_virtual_time(asyncio.sleep(1e6, result=1.0)), 1.0)


def test_a_version_that_was_never_loaded_is_refused(chat) -> None:
    class Old(Timed):
        def load_weights(self, weights, version):
            super().load_weights(weights, version - 7)

    with pytest.raises(RolloutError, match=r"tokens are of weights \[-7\], and the engine has been given \[0\]"):
        run_in_virtual_time(Run(chat, Old(lambda position: 1.0), staleness=1).train(1))


def test_the_benchmark_overlaps_carries_over_and_starves_nobody() -> None:
    """The claims of docs/results/streaming.md, at fewer collections."""
    overlap = [measure(LOADS["overlap"], 0, 20, staleness)["seconds"] for staleness in (0, 1)]
    assert overlap == [20 * 8, 7 + 20 * 4]
    barrier, carried = (measure(LOADS["tail"], 0, 15, staleness) for staleness in (0, 2))
    assert barrier["seconds"] > 1.5 * carried["seconds"]
    assert carried["staleness_max"] <= 2
    slow = shares(LOADS["shares"], 0, 60, 2, end_known=True)
    assert slow["drawn_slow_share"] == slow["trained_slow_share"] > 0.15
    assert slow["outstanding_at_the_end"] == 0
