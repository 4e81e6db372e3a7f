"""vLLM servers for tests: fake ones, and real ones where ``make vllm`` has been run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from sorl_lightning.adapters import adapter_parameters, adapter_rank, has_adapters
from sorl_lightning.lora import LoRA
from sorl_lightning.models import ModelSource
from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines import VLLMEngine
from sorl_lightning.rollout.vllm.launch import Launch, free_port
from sorl_lightning.rollout.vllm.probe import Nowhere
from sorl_lightning.rollout.vllm.process import ServerProcess
from sorl_lightning.rollout.vllm.session import processes_of
from sorl_lightning.rollout.vllm.transports import AdapterTransport, DiskTransport, GlooTransport, WeightTransport
from sorl_lightning.sharding import full_weights
from sorl_lightning.testing.fake_vllm import FakeVLLM

PYTHON = Path(os.environ.get("SORL_VLLM_PYTHON", Path(__file__).parents[1] / ".venv-vllm/bin/python"))
CONTEXT = 256
SHAPE = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT, "initializer_range": 0.1,
}  # fmt: skip


TRANSPORTS: dict[str, type[WeightTransport]] = {
    "disk": DiskTransport, "gloo": GlooTransport, "adapters": AdapterTransport,
}  # fmt: skip

MAX_LOGPROBS = {"gloo": 20}  # as a stock server has it


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server, and how to reach it.

    Attributes:
        real: whether vLLM runs there.
        url: where.
        tied: whether it serves a model whose output head is its embedding.
        process: of a real one.
        backend: of weight transfer; "adapters" for a model whose adapters alone are pushed.
    """

    real: bool
    url: str
    tied: bool
    backend: str
    process: ServerProcess | None = None

    @property
    def max_logprobs(self) -> int:
        """--max-logprobs; -1: the vocabulary."""
        return MAX_LOGPROBS.get(self.backend, -1)

    def policy(self, seed: int = 0) -> PreTrainedModel:
        return adapted(self.tied, seed) if self.backend == "adapters" else tiny(self.tied, seed)

    def engine(self, **settings: Any) -> VLLMEngine:
        return VLLMEngine(
            [self.url], transport=TRANSPORTS[self.backend](),
            **{"probe_every": 1, "probe_tolerance": 5e-5, **settings},
        )  # fmt: skip


def tiny(tied: bool, seed: int = 0) -> PreTrainedModel:
    """A model whose next tokens differ clearly."""
    torch.manual_seed(seed)
    if tied:
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)).eval()


def adapted(tied: bool, seed: int = 0) -> PreTrainedModel:
    """The same model for every seed, with adapters that change it clearly."""

    class Base(ModelSource):
        def load(self) -> Any:
            return tiny(tied), None

    model = LoRA(base=Base(), rank=8, seed=seed).load()[0]
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model):
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


@contextmanager
def serve(real: bool, tied: bool, backend: str, tokenizer: Any) -> Iterator[Served]:
    described = Served(real=real, url="", tied=tied, backend=backend)
    policy, limit = described.policy(), described.max_logprobs
    if not real:
        with FakeVLLM(policy, CONTEXT, backend, max_logprobs=limit, tokenizer=tokenizer) as fake:
            yield dataclasses.replace(described, url=fake.url)
        return
    with real_server(policy, tokenizer, backend, flags=("--max-logprobs", str(limit))) as (server, url):
        assert server.healthy()
        yield dataclasses.replace(described, url=url, process=server)


@contextmanager
def real_server(
    policy: PreTrainedModel,
    tokenizer: Any,
    backend: str = "disk",
    restarts: int = 0,
    flags: Sequence[str] = (),
    exported: Path | None = None,
) -> Iterator[tuple[ServerProcess, str]]:
    """A server of the policy's shape, or of a folder as it is, with the weights in it."""
    if not PYTHON.exists():
        pytest.fail(f"no vLLM at {PYTHON}: make vllm")
    folder = Path(tempfile.mkdtemp(prefix="sorl-vllm-test-"))
    launch = Launch(
        folder=folder, port=free_port(), model="policy", backend=TRANSPORTS[backend]().backend, dtype="float32",
        context=CONTEXT, cpu=True, python=str(PYTHON),
        flags=flags if exported is None else (*flags, "--load-format", "auto"),
        adapter_rank=adapter_rank(policy) if has_adapters(policy) else None,
    )  # fmt: skip
    launch.prepare(policy, tokenizer)
    if exported is not None:
        shutil.rmtree(folder / "model")
        shutil.copytree(exported, folder / "model")
    server = ServerProcess(launch.command(), launch.variables(), launch.url, folder / "log", restarts)
    try:
        server.start(timeout=1200)
        yield server, launch.url
    finally:
        if not server.healthy():
            print(server.tail(400))  # noqa: T201  # pytest shows it beside the failure
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def push(engine: VLLMEngine, policy: PreTrainedModel, version: int) -> None:
    engine.load_weights(full_weights(policy), version)


def request(prompt: Sequence[int], key: int = 0, **changes: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"max_tokens": 8, "stop_token_ids": (), "temperature": 1.0, "seed": key, **changes}
    return GenerationRequest(
        trajectory=TrajectoryKey(key, 0), prompt_ids=tuple(prompt), environment=Nowhere(), **settings
    )


@torch.no_grad()
def scores(policy: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of what follows the prompt."""
    logits = policy(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)


def named(session: int, name: str) -> int:
    """The process of a session that calls itself ``name``."""
    for pid in processes_of(session):
        if name in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise LookupError(name)


def weights(module: L.LightningModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
