"""Signals end a run between two optimiser steps, and leave a checkpoint to resume from."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning import cli
from sorl_lightning.callbacks import GracefulStop, Stopped, stoppable
from sorl_lightning.checkpoints import AtomicCheckpointIO
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import SmallLlama

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


class Sender(L.Callback):
    """Sends a signal in the first micro-batch of the second update of collection 1."""

    def __init__(self, name: signal.Signals, times: int = 1) -> None:
        self.name = name
        self.times = times

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.current_epoch == 1 and trainer.global_step == 3:
            while self.times:
                self.times -= 1
                os.kill(os.getpid(), self.name)


def rollouts(engine, fails=None) -> RolloutDataModule:
    return RolloutDataModule(
        Countdown(fails=fails), engine, tasks_per_collection=2, group_size=2, max_turns=4, max_tokens=4,
        context_limit=128, mini_batches=2, micro_batches=2,
    )  # fmt: skip


def stopped(trainer, tmp_path, callbacks, engine, fails=None):
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    module = agent()
    runner = trainer(
        max_epochs=4,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        callbacks=[GracefulStop(), *callbacks, saver],
    )
    before = [signal.getsignal(name) for name in SIGNALS]
    with pytest.raises(Stopped) as stop:
        runner.fit(module, datamodule=rollouts(engine, fails))
    assert stop.value.code == 0
    assert [signal.getsignal(name) for name in SIGNALS] == before
    assert engine.closed == 1
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["policy_version"] == 2  # of the last collection that was trained whole
    return module, str(stop.value)


@pytest.mark.parametrize("name", SIGNALS)
def test_the_step_in_progress_is_finished(trainer, tmp_path, name) -> None:
    module, reason = stopped(trainer, tmp_path, [Sender(name)], ScriptedEngine())
    assert reason == f"stopped by {name.name}; resume with --ckpt_path, from the last checkpoint"
    assert module.policy_version == 4


def test_a_second_signal_does_not_wait(trainer, tmp_path) -> None:
    module, _ = stopped(trainer, tmp_path, [Sender(signal.SIGINT, times=2)], ScriptedEngine())
    assert module.policy_version == 3


def test_a_collection_in_progress_is_given_up(trainer, tmp_path) -> None:
    def fails(task, attempt, text=None):
        if engine.version == 2 and text is None:
            os.kill(os.getpid(), signal.SIGTERM)

    engine = ScriptedEngine()
    module, reason = stopped(trainer, tmp_path, [], engine, fails)
    assert "SIGTERM" in reason
    assert module.policy_version == 2


def test_after_a_fit_that_ends_by_itself_signals_mean_what_they_meant(trainer) -> None:
    before = [signal.getsignal(name) for name in SIGNALS]
    trainer(accumulate_grad_batches=2, callbacks=[GracefulStop()]).fit(agent(), datamodule=rollouts(ScriptedEngine()))
    assert [signal.getsignal(name) for name in SIGNALS] == before


class Slow(SmallLlama):
    """A signal arrives while it loads."""

    def load(self):
        os.kill(os.getpid(), self.number)
        return super().load()


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_while_the_run_starts_ends_it_cleanly(trainer, name) -> None:
    before = [signal.getsignal(name) for name in SIGNALS]
    Slow.number = name
    engine = ScriptedEngine()
    slow = Slow(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=1)
    with pytest.raises(Stopped, match=f"^stopped by {name.name}$") as stop, stoppable():
        trainer(accumulate_grad_batches=2, callbacks=[GracefulStop()]).fit(
            agent(policy=slow), datamodule=rollouts(engine)
        )
    assert stop.value.code == 0
    assert engine.requests == []
    assert [signal.getsignal(name) for name in SIGNALS] == before


class Interrupted(io.FileIO):
    """A file whose third write is met by a signal."""

    writes = 0

    def write(self, content):
        self.writes += 1
        if self.writes == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(content)


def test_a_signal_while_a_checkpoint_is_written_is_a_stop_and_leaves_the_older_one(tmp_path, monkeypatch) -> None:
    target, written = tmp_path / "last.ckpt", AtomicCheckpointIO()
    written.save_checkpoint({"weights": torch.zeros(3)}, target)
    with monkeypatch.context() as patched, stoppable():
        patched.setattr(Path, "open", lambda path, mode: Interrupted(path, mode))
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            written.save_checkpoint({"weights": torch.ones(300_000)}, target)
    assert torch.load(target)["weights"].tolist() == [0, 0, 0]


def test_the_command_says_what_stopped_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "run", lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped) as stop:
        cli.main(["fit"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "sorl: stopped by SIGTERM\n"
