"""Adapters alone, which the server puts beside the weights that it was started with."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.adapters import adapter_rank, save_adapters
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.vllm.transports.disk import own_folder
from sorl_lightning.rollout.vllm.transports.transport import Post, WeightTransport
from sorl_lightning.rollout.vllm.wire import Server
from sorl_lightning.sharding import full_adapters


class AdapterTransport(WeightTransport):
    """The adapters of a LoRA policy, loaded in place of their predecessors; the other weights never travel.

    They are not rounded into the weights that they change, which in bfloat16 would swallow small ones. The servers must
    hold the policy's base: VLLMSidecar starts them with it.

    Args:
        folder: where both sides find them; servers on other nodes need a shared one. None is a folder of its own in
            memory (/dev/shm) or, where there is none, among the temporary files.
        name: that the servers give them.
    """

    def __init__(self, folder: str | None = None, name: str = "policy-adapters") -> None:
        self.folder = folder
        self.name = name
        self._place: Path | None = None
        self._policy: PreTrainedModel | None = None
        self._count = 0

    @property
    def backend(self) -> None:
        """None is needed."""

    def check(self, server: Server) -> None:
        """Refuse a server that takes no adapters."""
        if not server.adapters:
            raise ConfigurationError(
                f"{server.client.url} takes no adapters: start it with --enable-lora, a --max-lora-rank and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, or choose another VLLMEngine.transport"
            )

    def select(self, policy: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The adapters; ``weights``, in which they are merged, are left unread.

        Raises:
            ConfigurationError: the policy has none.
        """
        adapter_rank(policy)
        self._policy = policy
        return full_adapters(policy)

    def served_as(self, model: str) -> str:
        """The adapters' own name."""
        return self.name

    def connect(self, post: Post, workers: Sequence[int], timeout: float) -> None:
        """Make the folder."""
        if self._place is None:
            self._place = own_folder(self.folder)

    def deliver(self, weights: Iterable[tuple[str, Tensor]], name: str, post: Post, bucket_bytes: int) -> None:
        """Write, have it read, delete. Every time in another place, as vLLM asks for."""
        assert self._place is not None
        assert self._policy is not None
        self._count += 1
        path = self._place / str(self._count)
        save_adapters(self._policy, path, {key: tensor.cpu() for key, tensor in weights})
        try:
            post(
                "/v1/load_lora_adapter", [{"lora_name": self.name, "lora_path": str(path), "load_inplace": True}]
            ).result()
            post("/update_weight_version", [{"new_version": name}]).result()
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder that was made here."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place = self._policy = None
