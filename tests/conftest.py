"""Fixtures: the package's tokenizer, a tiny policy, and a real ``fit``."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import SmallLlama, load_tokenizer
from sorl_lightning.module import AgentModule
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.rollout.chat import Chat


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer("sorl:textworld")


@pytest.fixture(scope="session")
def chat(tokenizer: Any) -> Chat:
    return Chat(tokenizer)


TINY = SmallLlama(tokenizer="sorl:textworld", hidden_size=32, num_hidden_layers=1, context_length=256)


def agent(**settings: Any) -> AgentModule:
    """A tiny agent; ``settings`` override its arguments."""
    optimizer = settings.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return AgentModule(
        policy=settings.pop("policy", TINY), objective=settings.pop("objective", PolicyGradient()),
        optimizer=optimizer, **settings,
    )  # fmt: skip


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A factory of quiet trainers on the CPU."""

    def build(**settings: Any) -> L.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "default_root_dir": str(tmp_path),
            "max_epochs": 1,
        }
        return L.Trainer(**{**defaults, **settings})

    return build


@pytest.fixture
def fit(trainer: Any) -> Any:
    """Fit an agent on rollouts for real, and return it."""

    def run(module: AgentModule, data: RolloutDataModule, **settings: Any) -> AgentModule:
        trainer(accumulate_grad_batches=data.micro_batches, **settings).fit(module, datamodule=data)
        return module

    return run


# Servers, fake and real: whether it is real, whether the model's head is its embedding, how weights travel.
KINDS = [
    pytest.param((False, True, "disk"), id="fake-tied-disk"),
    pytest.param((False, False, "gloo"), id="fake-untied-gloo"),
    pytest.param((True, True, "disk"), id="real-tied-disk", marks=pytest.mark.vllm),
    pytest.param((True, False, "gloo"), id="real-untied-gloo", marks=pytest.mark.vllm),
    pytest.param((False, True, "adapters"), id="fake-tied-adapters"),
    pytest.param((True, True, "adapters"), id="real-tied-adapters", marks=pytest.mark.vllm),
]


def serving(*backends: str, real: bool | None = None) -> pytest.MarkDecorator:
    """Have a test run on some of the servers only."""
    chosen = [kind for kind in KINDS if kind.values[0][2] in backends and real in (None, kind.values[0][0])]
    return pytest.mark.parametrize("server", chosen, indirect=True)


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Any]:
    """A vLLM server, shared by all tests that ask for one."""
    import served

    with served.serve(*request.param, tokenizer) as found:
        yield found
