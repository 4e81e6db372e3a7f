"""The command line and environment of a vLLM server for rollouts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLUGIN = "sorl_lightning.vllm_plugin"
# What a run needs whatever the device; the routes for new weights belong to development mode.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Threads of several processes on few cores wait for each other; nobind and one thread each are up to ten times faster.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
# Compiling takes minutes on a CPU, and the cache of keys and values would take nearly all memory.
CPU_FLAGS = ("--enforce-eager", "--kv-cache-memory-bytes", str(256 * 2**20), "--max-num-seqs", "128")
# A prompt cut into chunks makes vLLM 0.32 rewind the request's generator; a CPU's cannot, and the engine would die.
CPU_UNCUT = ("--no-enable-chunked-prefill", "--max-num-batched-tokens")
STEP = 8192  # tokens that one step on a CPU takes at least


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one server is started.

    Attributes:
        folder: of the server's own: its model's shape, its temporary files.
        port: that it listens on, at 127.0.0.1.
        model: name under which it serves the policy.
        backend: of weight transfer.
        dtype: of its weights, as torch names it.
        context: most tokens of a sequence.
        cpu: whether to add what a CPU needs.
        python: interpreter that has vLLM; None: this one.
        flags: further arguments of ``vllm serve``; they come last, and win.
        environment: further variables; they win.
    """

    folder: Path
    port: int
    model: str
    backend: str
    dtype: str
    context: int
    cpu: bool
    python: str | None = None
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the server will answer."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write what the server reads: the policy's shape, the tokenizer, and this package without its neighbours."""
        policy.config.save_pretrained(self.folder / "model")
        tokenizer.save_pretrained(self.folder / "model")
        # The server's environment must not see the trainer's other packages, so the folder holds nothing else.
        package = self.folder / "path"
        package.mkdir()
        (package / "sorl_lightning").symlink_to(Path(__file__).parents[2])

    def command(self) -> list[str]:
        """Program and arguments. Weights are random at first: the engine pushes the policy's before it asks."""
        return [
            *(self.python or sys.executable, "-m", f"{PLUGIN}.serve", str(self.folder / "model")),
            *("--load-format", "dummy", "--generation-config", "vllm", "--dtype", self.dtype),
            *("--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enable-scale-out", "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs"),
            *("--worker-extension-cls", f"{PLUGIN}.weight_transfer.WorkerExtension"),
            *("--weight-transfer-config", f'{{"backend": "{self.backend}"}}'),
            *("--max-model-len", str(self.context)),
            *((*CPU_FLAGS, *CPU_UNCUT, str(max(STEP, self.context))) if self.cpu else ()),
            *self.flags,
        ]

    def variables(self) -> dict[str, str]:
        """The server's whole environment."""
        return {
            **os.environ,
            **ENVIRONMENT,
            **(CPU_ENVIRONMENT if self.cpu else {}),
            "PYTHONPATH": str(self.folder / "path"),
            "TMPDIR": str(self.folder),
            "SORL_END_WITH_STDIN": "1",
            **self.environment,
        }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
