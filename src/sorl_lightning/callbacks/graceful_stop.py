"""Stop between two optimiser steps when asked to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from sorl_lightning import ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(SystemExit):
    """A run that was asked to end has ended; its exit status is 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    @override
    def __str__(self) -> str:
        return self.reason


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, one of ``SIGNALS`` raises ``Stopped`` at once: there is no optimiser step to finish.

    A run's start (weights that load, a warm start) then ends as its training does. Only the main thread hears signals.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    here = threading.current_thread() is threading.main_thread()
    handlers = {name: signal.signal(name, receive) for name in SIGNALS} if here else {}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)


class GracefulStop(Callback):
    """End the run cleanly at SIGTERM, SIGUSR1 (preemption) or SIGINT (Ctrl-C).

    The optimiser step in progress is finished; a collection in progress is given up, and so is everything at a second
    signal. Engines and environments are closed and loggers flushed. The newest checkpoint is that of the last
    collection that was trained whole: what came after it is computed again, to the same numbers, by a resumed run.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._stepping = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._launcher: Any = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._launcher = trainer.strategy.launcher
        if threading.current_thread() is threading.main_thread():
            self._handlers = {name: signal.signal(name, self._receive) for name in SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again, self._received = self._received is not None, signal.Signals(number)
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher.kill(number)  # the other ranks, where they are children of this one
        if again or not self._stepping:
            self._stop()

    def _stop(self) -> None:
        name = self._received.name if self._received is not None else "a signal to another rank"
        raise Stopped(f"stopped by {name}; resume with --ckpt_path, from the last checkpoint")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stepping = True

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._stepping = False
            if ranks.anywhere(self._received is not None):
                self._stop()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()  # before Lightning puts back what was there before its own

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for name, handler in self._handlers.items():
            signal.signal(name, handler)
        self._handlers = {}
