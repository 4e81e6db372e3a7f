"""A vLLM server beside the trainer, for as long as a run lasts."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from sorl_lightning.adapters import adapter_rank
from sorl_lightning.control import Learner, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.engines.vllm import VLLMEngine
from sorl_lightning.rollout.vllm.launch import Launch, free_port
from sorl_lightning.rollout.vllm.process import ServerProcess
from sorl_lightning.rollout.vllm.transports import AdapterTransport

logger = logging.getLogger(__name__)


class VLLMSidecar(Callback):
    """Start a vLLM server when a run starts, give its address to the datamodule's VLLMEngine, and end it with the run.

    The server begins with random weights of the policy's shape and gets the policy's from the engine; for an
    AdapterTransport it begins with those beside the adapters. An engine that
    has addresses already is left to the servers that run there. With several ranks each starts a server of its own.

    Args:
        python: interpreter of the environment that vLLM is installed in (``make vllm``); None: this one.
        device: "cpu" adds flags and environment that a CPU needs; "auto" is "gpu" where this process sees CUDA.
        dtype: type of the served weights; None: that of the policy.
        flags: further arguments of ``vllm serve``; they come last, and win.
        environment: further environment variables; they win.
        port: of the server; 0 takes a free one.
        start_timeout: seconds until it must be healthy.
        restarts: times that it is started again when it dies.
        log_file: of its output; None is vllm_sidecar.log in the run's folder.
    """

    def __init__(
        self,
        python: str | None = None,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        dtype: str | None = None,
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        port: int = 0,
        start_timeout: float = 600.0,
        restarts: int = 2,
        log_file: str | None = None,
    ) -> None:
        self.python = python
        self.device = device
        self.dtype = dtype
        self.flags = flags
        self.environment = environment
        self.port = port
        self.start_timeout = start_timeout
        self.restarts = restarts
        self.log_file = log_file
        self.server: ServerProcess | None = None
        self._engine: VLLMEngine | None = None
        self._folder: Path | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        engine_of(trainer)
        if self.python is not None and shutil.which(self.python) is None:
            raise ConfigurationError(
                f"VLLMSidecar.python={self.python!r} is no interpreter: make vllm sets one up in .venv-vllm"
            )

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer, pl_module)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(engine_of(trainer).figures)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.stop()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and take its address back. Safe to call twice."""
        if self.server is not None:
            self.server.stop()
        if self._engine is not None:
            self._engine.sidecar = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.server = self._engine = self._folder = None

    def _start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = engine_of(trainer)
        if engine.urls or self.server is not None:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        learner = owner_of(Learner, pl_module)  # type: ignore[type-abstract]
        policy = learner.policy_model
        self._folder = Path(tempfile.mkdtemp(prefix="sorl-vllm-"))
        launch = Launch(
            folder=self._folder,
            port=self.port or free_port(),
            model=engine.model,
            backend=engine.transport.backend,
            adapter_rank=adapter_rank(policy) if isinstance(engine.transport, AdapterTransport) else None,
            dtype=self.dtype or str(policy.dtype).removeprefix("torch."),
            context=data.context_limit or policy.config.get_text_config().max_position_embeddings,
            cpu=self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available()),
            python=self.python,
            flags=self.flags,
            environment=self.environment or {},
        )
        launch.prepare(policy, learner.tokenizer)
        log = Path(self.log_file or Path(trainer.log_dir or trainer.default_root_dir) / "vllm_sidecar.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.server = ServerProcess(launch.command(), launch.variables(), launch.url, log, self.restarts)
        logger.info("starting vLLM, log in %s", log)
        try:
            self.server.start(self.start_timeout)
        except BaseException:
            self.stop()
            raise
        self._engine = engine
        engine.sidecar = launch.url


def engine_of(trainer: L.Trainer) -> VLLMEngine:
    """The datamodule's engine.

    Raises:
        ConfigurationError: it is none that could use a server.
    """
    engine = trainer.datamodule.engine  # type: ignore[attr-defined]
    if not isinstance(engine, VLLMEngine):
        raise ConfigurationError(
            f"VLLMSidecar starts a server for data.engine, which is {type(engine).__name__}: set it to VLLMEngine, or "
            "leave the callback out"
        )
    return engine
