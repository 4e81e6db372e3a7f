"""The engine inside the fake server: samples from a Hugging Face model, takes weights from files or broadcasts."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.adapters import PREFIX, WEIGHTS, adapter_parameters, has_adapters


class FakeModel:
    """A copy of ``model`` with weights of its own, random until they arrive.

    Args:
        model: whose architecture is served. Where it has adapters these alone are random.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        weights = adapter_parameters(self.model) if has_adapters(self.model) else self.model.named_parameters()
        for _, parameter in weights:
            parameter.data.normal_(0.0, 0.01, generator=generator)
        self.group: Any = None

    @torch.no_grad()
    def sample(self, prompt: list[int], settings: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities, from the request's own seed."""
        generator = torch.Generator().manual_seed(settings["seed"])
        ids, logprobs = list(prompt), []
        temperature = settings["temperature"] or 1.0
        while len(ids) - len(prompt) < settings["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            scores = torch.log_softmax(logits / temperature, -1)
            draw = torch.multinomial(scores.exp(), 1, generator=generator)
            token = int(draw if settings["temperature"] else scores.argmax())
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token in settings.get("stop_token_ids", ()):
                break
        return ids[len(prompt) :], logprobs

    @torch.no_grad()
    def score(self, prompt: list[int], top_k: int) -> list[dict[int, float]]:
        """Log-probabilities at each prompt token but the first: its own, and the top K."""
        scores = torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0, :-1].float(), -1)
        found = []
        for row, token in zip(scores, prompt[1:], strict=True):
            top = row.topk(top_k)
            found.append(
                {token: float(row[token]), **dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))}
            )
        return found

    def join(self, info: dict[str, Any]) -> None:
        """Join the trainer's group, where there is one."""
        if "host" in info:
            limit = timedelta(seconds=info["timeout"])
            store = dist.TCPStore(info["host"], info["port"], info["world_size"], False, limit)
            self.group = dist.ProcessGroupGloo(store, info["rank_offset"], info["world_size"], limit)

    def load(self, info: dict[str, Any]) -> None:
        """Load one bucket.

        Raises:
            FileNotFoundError: its file is not there.
        """
        for name, tensor in load_file(info["path"]).items() if "path" in info else self._received(info):
            self.model.get_parameter(name).copy_(tensor)

    def load_adapters(self, folder: str) -> None:
        """Load adapters as peft saves them."""
        from peft import set_peft_model_state_dict

        weights = load_file(Path(folder) / WEIGHTS)
        set_peft_model_state_dict(self.model, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()})

    def _received(self, info: dict[str, Any]) -> list[tuple[str, Tensor]]:
        tensors = []
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
            tensors.append((name, tensor))
        return tensors
