"""Real servers that start and end with a run, die in the middle of it, or lose the trainer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from conftest import agent
from doubles import Countdown
from served import PYTHON, tiny
from sorl_lightning.callbacks import VLLMSidecar
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.models import load_tokenizer
from sorl_lightning.rollout.engines import LocalEngine, VLLMEngine
from sorl_lightning.rollout.vllm.session import processes_of, shared_memory_of

TESTS = Path(__file__).parents[1]


class Source:
    def load(self) -> Any:
        return tiny(True), load_tokenizer("sorl:textworld")


class Witness(L.Callback):
    """Remembers the server's processes and memory, to look for them afterwards."""

    def __init__(self, sidecar: VLLMSidecar) -> None:
        self.sidecar = sidecar
        self.sessions: set[int] = set()
        self.segments: set[Path] = set()
        self.urls: set[str] = set()

    def look(self) -> None:
        server = self.sidecar.server
        assert server is not None
        self.sessions.add(server.pid)
        self.segments |= shared_memory_of(processes_of(server.pid))
        self.urls.add(server.url)

    def on_train_batch_start(self, *_: Any) -> None:
        self.look()

    def assert_gone(self) -> None:
        assert self.sessions
        assert self.segments
        assert [pid for session in self.sessions for pid in processes_of(session)] == []
        assert [segment for segment in self.segments if segment.exists()] == []
        for url in self.urls:
            with socket.socket() as visitor:
                assert visitor.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


class Assassin(Countdown):
    """Kills a process of the server at the sixth step of the run."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__()
        self.kill = kill
        self.steps = [0]  # shared by all episodes

    def step(self, text: str) -> Any:
        self.steps[0] += 1
        if self.steps[0] == 6:
            self.kill()
        return super().step(text)


def rollouts(environment: Any, engine: Any = None) -> RolloutDataModule:
    engine = engine or VLLMEngine(attempts=2, probe_every=1, probe_tolerance=5e-5)
    return RolloutDataModule(
        environment, engine, tasks_per_collection=2, group_size=2, max_turns=3, max_tokens=6, context_limit=128
    )


def weights(module: L.LightningModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Weights after a run whose server lives; it leaves nothing behind."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sidecar = VLLMSidecar(python=str(PYTHON), device="cpu")
    witness = Witness(sidecar)
    module, data = agent(policy=Source()), rollouts(Countdown())
    trainer = quiet(folder, [sidecar, witness])
    trainer.fit(module, datamodule=data)
    witness.assert_gone()
    assert data.engine.sidecar is None
    assert module.policy_version == 2
    assert 0 < float(trainer.callback_metrics["engine/probe_difference"]) < 5e-5
    assert "Application startup complete" in (folder / "vllm_sidecar.log").read_text()
    return weights(module)


def quiet(folder: Path, callbacks: list[L.Callback]) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, default_root_dir=str(folder),
        max_epochs=2, callbacks=callbacks,
    )  # fmt: skip


def named(session: int, name: str) -> int:
    """The process of a session that calls itself ``name``."""
    for pid in processes_of(session):
        if name in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise LookupError(name)


VICTIMS = {
    "api": lambda session: session,
    "engine": lambda session: named(session, "EngineCore"),
    "worker": lambda session: named(session, "Worker"),
}


@pytest.mark.vllm
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_server_comes_back_and_the_run_goes_on_as_if_nothing_had_been(
    victim: str, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    sidecar = VLLMSidecar(python=str(PYTHON), device="cpu", restarts=1)
    witness = Witness(sidecar)

    def kill() -> None:
        witness.look()
        assert sidecar.server is not None
        os.kill(VICTIMS[victim](sidecar.server.pid), signal.SIGKILL)

    module, data = agent(policy=Source()), rollouts(Assassin(kill))
    data.engine.outage_timeout = 600.0
    quiet(tmp_path, [sidecar, witness]).fit(module, datamodule=data)
    assert len(witness.sessions) == 2
    witness.assert_gone()
    assert module.policy_version == 2
    torch.testing.assert_close(weights(module), undisturbed, rtol=0, atol=1e-5)


@pytest.mark.vllm
def test_a_server_that_may_not_come_back_ends_the_run_with_one_message(tmp_path: Path) -> None:
    sidecar = VLLMSidecar(python=str(PYTHON), device="cpu", restarts=0)
    witness = Witness(sidecar)

    def kill() -> None:
        witness.look()
        assert sidecar.server is not None
        os.kill(sidecar.server.pid, signal.SIGKILL)

    module, data = agent(policy=Source()), rollouts(Assassin(kill))
    data.engine.outage_timeout = 3.0
    before = weights_at_start()
    with pytest.raises(EngineOutage, match="was not healthy within 3 s"):
        quiet(tmp_path, [sidecar, witness]).fit(module, datamodule=data)
    witness.assert_gone()
    assert module.policy_version == 0
    torch.testing.assert_close(weights(module), before, rtol=0, atol=0)


def weights_at_start() -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in tiny(True).parameters()])


def train(folder: str) -> None:
    """A run that goes on for ever, in a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    environment = Countdown()
    trainer = quiet(Path(folder), [VLLMSidecar(python=str(PYTHON), device="cpu")])
    trainer.fit_loop.max_epochs = 100_000
    trainer.fit(agent(policy=Source()), datamodule=rollouts(environment))


@pytest.mark.vllm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_does_not_outlive_the_trainer(number: signal.Signals, tmp_path: Path) -> None:
    paths = os.pathsep.join(map(str, (TESTS, TESTS / "callbacks", TESTS.parent / "src")))
    code = f"import test_vllm_sidecar; test_vllm_sidecar.train({str(tmp_path)!r})"
    trainer = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_for(lambda: "Application startup complete" in read(tmp_path / "vllm_sidecar.log"), 600)
        time.sleep(3.0)  # turns are being generated
        (session,) = (pid for pid in children(trainer.pid) if processes_of(pid))
        segments = shared_memory_of(processes_of(session))
        assert segments
        trainer.send_signal(number)
        trainer.wait(timeout=120)
        wait_for(lambda: not processes_of(session), 60)
        wait_for(lambda: not any(segment.exists() for segment in segments), 10)
    finally:
        trainer.kill()
        trainer.wait()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.name))
    return found


# Without a server


def test_a_launcher_that_loses_its_starter_takes_folders_with_it(tmp_path: Path) -> None:
    folder, weights = tmp_path / "own", Path(f"/dev/shm/sorl-weights-{os.getpid()}-0-test")
    for path in (folder, weights):
        path.mkdir()
        (path / "file").write_text("left")
    code = "from sorl_lightning.vllm_plugin import serve; serve.GRACE = 0.5; serve.end_with_starter()"
    environment = {
        "TMPDIR": str(folder),
        "SORL_END_WITH_STDIN": f"{os.getpid()}-0",
        "PYTHONPATH": f"{TESTS.parent}/src",
    }
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, **environment}
    )
    assert launcher.stdin is not None
    launcher.stdin.close()
    assert launcher.wait(timeout=60) == -signal.SIGTERM
    wait_for(lambda: not folder.exists() and not weights.exists(), 20)


def test_an_engine_that_needs_no_server_is_refused(trainer: Any) -> None:
    data = rollouts(Countdown(), LocalEngine())
    with pytest.raises(ConfigurationError, match=r"data\.engine, which is LocalEngine"):
        trainer(callbacks=[VLLMSidecar()]).fit(agent(policy=Source()), datamodule=data)


def test_a_missing_interpreter_is_refused(trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match="make vllm"):
        trainer(callbacks=[VLLMSidecar(python="/nowhere/python")]).fit(
            agent(policy=Source()), datamodule=rollouts(Countdown())
        )


def test_a_server_that_does_not_start_shows_the_end_of_its_log(trainer: Any, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho some words before\necho the disk is full >&2\nexit 3\n")
    broken.chmod(0o755)
    data = rollouts(Countdown())
    with pytest.raises(EngineOutage, match=r"(?s)ended after .*the disk is full") as caught:
        trainer(callbacks=[VLLMSidecar(python=str(broken))]).fit(agent(policy=Source()), datamodule=data)
    assert "some words before" in str(caught.value)
    assert data.engine.sidecar is None


def test_an_engine_with_addresses_is_left_to_its_servers(trainer: Any) -> None:
    from sorl_lightning.testing.fake_vllm import FakeVLLM

    with FakeVLLM(tiny(True)) as fake:
        data = rollouts(Countdown(), VLLMEngine([fake.url]))
        sidecar = VLLMSidecar()
        module = agent(policy=Source())
        trainer(callbacks=[sidecar], max_epochs=2).fit(module, datamodule=data)
        assert sidecar.server is None
        assert data.engine.urls == [fake.url]
        assert module.policy_version == 2
