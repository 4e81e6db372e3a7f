"""A server with the routes of vLLM 0.32 that VLLMEngine uses, and faults on request.

It shows what a trainer does with answers, not what a server answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.adapters import has_adapters
from sorl_lightning.testing.fake_model import FakeModel
from sorl_lightning.testing.faulty_server import JSON, FaultyServer

SCORED = "processed_logprobs"


class FakeVLLM(FaultyServer):
    """A context manager: the server runs inside it, at ``url``.

    Args:
        model: what it serves; its weights have to be pushed, as to a real server. One with adapters takes adapters.
        context_limit: --max-model-len.
        backend: of weight transfer, "disk" or "gloo".
        version: of vLLM.
        generate: whether /inference/v1/generate is open (--enable-scale-out).
        logprobs_mode: --logprobs-mode.
        max_logprobs: --max-logprobs; -1: the vocabulary.
        tokenizer: what /tokenize uses.

    Attributes:
        stale: serve the weights of the first push for ever, whatever is pushed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context_limit: int = 256,
        backend: str = "disk",
        version: str = "0.32.0",
        generate: bool = True,
        logprobs_mode: str = SCORED,
        max_logprobs: int = -1,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        self.model = FakeModel(model)
        self.takes_adapters = has_adapters(model)
        self.names = ["policy"]
        self.context_limit = context_limit
        self.backend = backend
        self.version = version
        self.generate = generate
        self.logprobs_mode = logprobs_mode
        self.max_logprobs = max_logprobs
        self.tokenizer = tokenizer
        self.stale = False
        self.weight_version = "default"
        self._updating = self._pushed = False
        self._running = asyncio.Event()
        self._running.set()

    def has(self, route: str) -> bool:
        """The one for turns, and the one for adapters where it takes them."""
        turns = route == "/inference/v1/generate" and self.generate
        return turns or (route == "/v1/load_lora_adapter" and self.takes_adapters)

    # What it is

    async def _get_health(self, body: JSON) -> JSON:
        return {}

    async def _get_version(self, body: JSON) -> JSON:
        return {"version": self.version}

    async def _get_v1_models(self, body: JSON) -> JSON:
        return {
            "data": [{"id": name, "parent": "policy" if number else None} for number, name in enumerate(self.names)]
        }

    async def _post_tokenize(self, body: JSON) -> JSON:
        if self.tokenizer is None:
            raise web.HTTPNotFound(text="no tokenizer")
        return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])}

    async def _get_get_world_size(self, body: JSON) -> JSON:
        return {"world_size": 1}

    async def _get_weight_info(self, body: JSON) -> JSON:
        return {"weight_version": self.weight_version}

    async def _get_server_info(self, body: JSON) -> JSON:
        model = {"max_model_len": self.context_limit, "logprobs_mode": self.logprobs_mode}
        transfer = {"backend": self.backend}
        adapters = {"max_lora_rank": 16} if self.takes_adapters else None
        return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer, "lora_config": adapters}}

    # New weights

    async def _post_pause(self, body: JSON) -> JSON:
        self._running.clear()
        return {"status": "paused"}

    async def _post_resume(self, body: JSON) -> JSON:
        self._running.set()
        return {"status": "resumed"}

    async def _post_sleep(self, body: JSON) -> JSON:
        return {}

    async def _post_wake_up(self, body: JSON) -> JSON:
        return {}

    async def _post_init_weight_transfer_engine(self, body: JSON) -> JSON:
        await self._in_thread(self.model.join, body["init_info"])
        return {}

    async def _post_start_weight_update(self, body: JSON) -> JSON:
        if self._updating:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._updating = True
        return {}

    async def _post_update_weights(self, body: JSON) -> JSON:
        if not self._updating:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            if not (self.stale and self._pushed):
                await self._in_thread(self.model.load, body["update_info"])
        except BaseException:
            self._updating = False
            raise
        return {}

    async def _post_finish_weight_update(self, body: JSON) -> JSON:
        if not self._updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self._updating, self._pushed = False, True
        self.weight_version = body["weight_version"]
        return {}

    async def _post_v1_load_lora_adapter(self, body: JSON) -> JSON:
        await self._in_thread(self.model.load_adapters, body["lora_path"])
        self.names = ["policy", body["lora_name"]]
        return {}

    async def _post_update_weight_version(self, body: JSON) -> JSON:
        self.weight_version = body["new_version"]
        return {}

    # Turns

    async def _post_inference_v1_generate(self, body: JSON) -> JSON:
        if not self.generate:
            raise web.HTTPForbidden(text="start the server with --enable-scale-out")
        self._check_name(body["model"])
        ids, logprobs, reason, prompt_logprobs = await self._turn(body["token_ids"], body["sampling_params"])
        content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)]
        choice = {
            "token_ids": ids,
            "finish_reason": reason,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content},
        }
        return {"choices": [choice], "prompt_logprobs": prompt_logprobs}

    async def _post_v1_completions(self, body: JSON) -> JSON:
        self._check_name(body["model"])
        ids, logprobs, reason, prompt_logprobs = await self._turn(body["prompt"], body)
        choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs}}
        return {"choices": [{**choice, "prompt_logprobs": prompt_logprobs}]}

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise web.HTTPNotFound(text=f"The model `{name}` does not exist.")

    async def _turn(self, prompt: list[int], settings: JSON) -> tuple[list[int], list[float], str, Any]:
        await self._running.wait()
        asked = settings.get("prompt_logprobs") or 0
        if 0 <= self.max_logprobs < asked:
            raise web.HTTPBadRequest(
                text=f"Requested prompt logprobs of {asked}, which is greater than max allowed: {self.max_logprobs}"
            )
        ids, logprobs = await self._in_thread(self.model.sample, prompt, {"seed": 0, **settings})
        reason = "stop" if ids and ids[-1] in settings.get("stop_token_ids", ()) else "length"
        if settings.get("prompt_logprobs") is None:
            return ids, logprobs, reason, None
        scores = await self._in_thread(self.model.score, prompt, settings["prompt_logprobs"])
        entries = [{str(token): {"logprob": score} for token, score in entry.items()} for entry in scores]
        return ids, logprobs, reason, [None, *entries]
