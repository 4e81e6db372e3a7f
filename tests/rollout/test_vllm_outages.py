"""Runs whose real server hangs, refuses or is given other weights: they go on as if nothing had been, or end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import agent, serving
from doubles import Countdown
from served import Served, named, push, tiny, weights
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import EngineOutage
from sorl_lightning.models import load_tokenizer
from sorl_lightning.rollout.vllm.transports import Bucket, DiskTransport

real = serving("disk", real=True)


class Source:
    def load(self) -> Any:
        return tiny(True), load_tokenizer("sorl:textworld")


class Lossy(DiskTransport):
    """Loses buckets: the server finds no file."""

    def __init__(self, lost: range) -> None:
        super().__init__()
        self.lost = lost
        self.sent = 0

    def send(self, bucket: Bucket, post: Any) -> None:
        self.sent += 1
        if self.sent - 1 not in self.lost:
            return super().send(bucket, post)
        return post("/update_weights", [{"update_info": {"path": "/nowhere/bucket.safetensors"}}]).result()


class Frozen(DiskTransport):
    """Stops a process of the server once, in the middle of the second push."""

    def __init__(self, process: int, seconds: float | None = None) -> None:
        super().__init__()
        self.process = process
        self.seconds = seconds
        self.sent = 0

    def send(self, bucket: Bucket, post: Any) -> None:
        self.sent += 1
        if self.sent == 2:
            os.kill(self.process, signal.SIGSTOP)
            if self.seconds is not None:
                threading.Timer(self.seconds, os.kill, (self.process, signal.SIGCONT)).start()
        super().send(bucket, post)


def run(fit: Any, server: Served, environment: Any = None, transport: Any = None, outage_timeout: float = 60.0) -> Any:
    """Two collections. The module is kept where the run ends early."""
    engine = server.engine(push_timeout=8.0, attempts=2, outage_timeout=outage_timeout)
    engine.transport = transport or engine.transport
    module = agent(policy=Source())
    data = RolloutDataModule(
        environment or Countdown(), engine, tasks_per_collection=2, group_size=2, max_turns=3, max_tokens=6,
        context_limit=128,
    )  # fmt: skip
    try:
        fit(module, data, max_epochs=2)
    except EngineOutage as error:
        return module, error
    return module, None


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Weights after an undisturbed run, for all tests."""
    return []


@pytest.fixture
def undisturbed(fit: Any, server: Served, expected: list[torch.Tensor]) -> torch.Tensor:
    if not expected:
        expected.append(weights(run(fit, server)[0]))
    return expected[0]


def as_if_nothing_had_been(result: Any, undisturbed: torch.Tensor) -> None:
    module, error = result
    assert error is None
    assert module.policy_version == 2
    torch.testing.assert_close(weights(module), undisturbed, rtol=0, atol=1e-5)


def words_of_pushes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of pushes that failed and were tried again."""
    return [record.getMessage() for record in caplog.records if "were not pushed" in record.getMessage()]


def no_weights_are_left() -> bool:
    return not [*Path("/dev/shm").glob(f"sorl-weights-{os.getpid()}-*")]


@real
def test_a_push_that_hangs_for_a_while_is_got_over(
    fit: Any, server: Served, undisturbed: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    worker = named(server.process.pid, "Worker")
    as_if_nothing_had_been(run(fit, server, transport=Frozen(worker, seconds=10.0)), undisturbed)
    (words,) = words_of_pushes(caplog)
    assert f"{server.url} did not answer /update_weights within " in words


@real
def test_a_push_that_hangs_for_ever_ends_the_run_with_one_message(
    fit: Any, server: Served, undisturbed: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a request of a server whose worker hangs is answered, so what fails next is not a push."""
    worker = named(server.process.pid, "Worker")
    try:
        module, error = run(fit, server, transport=Frozen(worker), outage_timeout=8.0)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert str(error) == (f"{server.url} was not healthy within 8 s: {server.url} did not answer /health within 5 s")
    (words,) = words_of_pushes(caplog)
    assert f"{server.url} did not answer /update_weights within " in words
    assert module.policy_version == 1
    assert no_weights_are_left()
    as_if_nothing_had_been(run(fit, server), undisturbed)  # and the server takes the next one


@real
def test_an_error_in_a_push_is_got_over(fit: Any, server: Served, undisturbed: torch.Tensor) -> None:
    as_if_nothing_had_been(run(fit, server, transport=Lossy(range(1, 2))), undisturbed)


@real
def test_errors_in_every_push_end_the_run_with_the_servers_words(
    fit: Any, server: Served, undisturbed: torch.Tensor
) -> None:
    module, error = run(fit, server, transport=Lossy(range(1, 100)))
    assert ":1 were not pushed: " in str(error)
    assert f"{server.url} answered 500 to /update_weights: " in str(error)
    assert "is not there: do trainer and server share this folder?" in str(error)  # vLLM leaves paths out
    assert "\n" not in str(error)
    assert module.policy_version == 1
    assert no_weights_are_left()
    as_if_nothing_had_been(run(fit, server), undisturbed)


class Rival(Countdown):
    """Has somebody else push older weights in the middle of the first collection, once."""

    def __init__(self, server: Served) -> None:
        super().__init__()
        self.server = server
        self.steps = [0]

    def step(self, text: str) -> Any:
        self.steps[0] += 1
        if self.steps[0] == 3:
            other = self.server.engine(probe_every=0)
            other.attach(self.server.policy(seed=9))
            push(other, self.server.policy(seed=9), 0)
            other.close()
        return super().step(text)


@real
def test_turns_of_other_weights_are_never_trained(fit: Any, server: Served, undisturbed: torch.Tensor) -> None:
    as_if_nothing_had_been(run(fit, server, Rival(server)), undisturbed)
