"""Runs whose real server hangs, refuses or is given other weights: they go on as if nothing had been, or end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
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


class After(L.Callback):
    """Does something when the first collection has been trained."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.action()


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


def run(fit: Any, server: Served, environment: Any = None, callbacks: Any = (), transport: Any = None) -> Any:
    """Two collections. The module is kept where the run ends early."""
    engine = server.engine(push_timeout=6.0, attempts=2, outage_timeout=60.0)
    engine.transport = transport or engine.transport
    module = agent(policy=Source())
    data = RolloutDataModule(
        environment or Countdown(), engine, tasks_per_collection=2, group_size=2, max_turns=3, max_tokens=6,
        context_limit=128,
    )  # fmt: skip
    try:
        fit(module, data, callbacks=[*callbacks], max_epochs=2)
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


@real
def test_a_push_that_hangs_for_a_while_is_got_over(fit: Any, server: Served, undisturbed: torch.Tensor) -> None:
    worker = named(server.process.pid, "Worker")

    def freeze() -> None:
        os.kill(worker, signal.SIGSTOP)
        threading.Timer(8.0, os.kill, (worker, signal.SIGCONT)).start()

    as_if_nothing_had_been(run(fit, server, callbacks=[After(freeze)]), undisturbed)


@real
def test_an_error_in_a_push_is_got_over(fit: Any, server: Served, undisturbed: torch.Tensor) -> None:
    as_if_nothing_had_been(run(fit, server, transport=Lossy(range(1, 2))), undisturbed)


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
