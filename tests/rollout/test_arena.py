"""An arena gives back what plays in it, once, and plays on afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from doubles import Countdown, ScriptedEngine
from sorl_lightning.rollout.arena import Arena


class Closing(Countdown):
    """Counts how often it is closed, in whose loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def close(self) -> None:
        self.loops.append(asyncio.get_running_loop())


class Meeting(ScriptedEngine):
    """Remembers whom it met."""

    met: tuple[Any, ...] = ()

    def attach(self, policy: Any, tokenizer: Any) -> None:
        self.met = (*self.met, policy)


async def current_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_engines_are_met_once_and_given_back_with_environment_and_loop(tokenizer: Any) -> None:
    world, engine, other = Closing(), Meeting(), Meeting()
    with Arena(world) as arena:
        for each in (engine, engine, other):
            arena.attach(each, "a model", tokenizer)  # type: ignore[arg-type]
        first = arena.run(current_loop())
    assert (engine.met, other.met) == (("a model",), ("a model",))
    assert (engine.closed, other.closed) == (1, 1)
    assert world.loops == [first]
    assert first.is_closed()


def test_after_the_end_it_starts_anew(tokenizer: Any) -> None:
    world, engine = Closing(), Meeting()
    arena = Arena(world)
    for model in ("a model", "another"):
        arena.attach(engine, model, tokenizer)  # type: ignore[arg-type]
        arena.close()
    assert engine.met == ("a model", "another")
    assert engine.closed == 2


def test_an_error_gives_everything_back_too(tokenizer: Any) -> None:
    engine = Meeting()

    def play() -> None:
        with Arena(Countdown()) as arena:  # a world with nothing to close
            arena.attach(engine, "a model", tokenizer)  # type: ignore[arg-type]
            raise KeyError

    with pytest.raises(KeyError):
        play()
    assert engine.closed == 1
