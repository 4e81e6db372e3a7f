"""The command line and environment of a vLLM server for rollouts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.rollout.vllm.transports import buckets
from sorl_lightning.sharding import full_weights

PLUGIN = "sorl_lightning.vllm_plugin"
# What a run needs whatever the device; the routes for new weights belong to development mode.
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}  # fmt: skip
# Threads of several processes on few cores wait for each other; nobind and one thread each are up to ten times faster.
# The first request would wait for a C++ compiler, for a function that counts ranks of log-probabilities.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
IPC_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # the trainer's handles are pickled
# Compiling takes minutes on a CPU, and the cache of keys and values would take nearly all memory.
CPU_FLAGS = ("--enforce-eager", "--kv-cache-memory-bytes", str(256 * 2**20), "--max-num-seqs", "128")
# A prompt cut into chunks makes vLLM 0.32 rewind the request's generator; a CPU's cannot, and the engine would die.
CPU_UNCUT = ("--no-enable-chunked-prefill", "--max-num-batched-tokens")
STEP = 8192  # tokens that one step on a CPU takes at least
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank knows
SHARD = 2**30  # bytes of a file of weights


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one server is started.

    Attributes:
        folder: of the server's own: its model's shape, its temporary files.
        port: that it listens on, at 127.0.0.1.
        model: name under which it serves the policy.
        backend: of weight transfer; None for none.
        dtype: of its weights, as torch names it.
        context: most tokens of a sequence.
        cpu: whether to add what a CPU needs.
        adapter_rank: of the adapters that will come; the server then starts with the policy's base instead of random
            weights. None: the weights themselves will come.
        python: interpreter that has vLLM; None: this one.
        flags: further arguments of ``vllm serve``; they come last, and win.
        environment: further variables; they win.
    """

    folder: Path
    port: int
    model: str
    backend: str | None
    dtype: str
    context: int
    cpu: bool
    adapter_rank: int | None = None
    python: str | None = None
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the server will answer."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write what the server reads: the policy's shape, the tokenizer, and this package without its neighbours.

        Where adapters will come, all ranks must take part: the weights beside them are gathered.
        """
        model = self.folder / "model"
        policy.config.save_pretrained(model)
        tokenizer.save_pretrained(model)
        if self.adapter_rank is not None:
            for number, bucket in enumerate(buckets(full_weights(policy, merged=False), SHARD)):
                weights = {name: tensor.cpu().contiguous() for name, tensor in bucket}
                save_file(weights, model / f"model-{number:05d}.safetensors")
        # The server's environment must not see the trainer's other packages, so the folder holds nothing else.
        package = self.folder / "path"
        package.mkdir()
        (package / "sorl_lightning").symlink_to(Path(__file__).parents[2])

    def command(self) -> list[str]:
        """Program and arguments. Weights are random at first: the engine pushes the policy's before it asks."""
        return [
            *(self.python or sys.executable, "-m", f"{PLUGIN}.serve", str(self.folder / "model")),
            *("--generation-config", "vllm", "--dtype", self.dtype),
            *("--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enable-scale-out", "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", f"{PLUGIN}.weight_transfer.WorkerExtension"),
            *self._weights(),
            *("--max-model-len", str(self.context)),
            *((*CPU_FLAGS, *CPU_UNCUT, str(max(STEP, self.context))) if self.cpu else ()),
            *self.flags,
        ]

    def _weights(self) -> Sequence[str]:
        """Where weights come from."""
        if self.adapter_rank is not None:
            rank = min((known for known in RANKS if known >= self.adapter_rank), default=self.adapter_rank)
            return "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)
        return "--load-format", "dummy", "--weight-transfer-config", f'{{"backend": "{self.backend}"}}'

    def variables(self) -> dict[str, str]:
        """The server's whole environment."""
        return {
            **os.environ,
            **ENVIRONMENT,
            **(CPU_ENVIRONMENT if self.cpu else {}),
            **(IPC_ENVIRONMENT if self.backend == "ipc" else {}),
            "PYTHONPATH": str(self.folder / "path"),
            "TMPDIR": str(self.folder),
            "SORL_END_WITH_STDIN": str(os.getpid()),
            **self.environment,
        }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
