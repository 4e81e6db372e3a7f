"""A server with the routes of vLLM 0.32 that VLLMEngine uses, and faults on request.

It shows what a trainer does with answers, not what a server answers.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.adapters import has_adapters
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.testing.fake_model import FakeModel

JSON = dict[str, Any]
SCORED = "processed_logprobs"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with a request, instead of or after its answer.

    Attributes:
        status: answered with ``text`` in place of the real answer.
        hang: seconds before anything is answered.
        change: makes another answer of the real one.
    """

    status: int | None = None
    text: str = "broken on request"
    hang: float = 0.0
    change: Callable[[JSON], Any] | None = None


class FakeVLLM:
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
        requests: route and body of every request, in order.
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
        self.requests: list[tuple[str, JSON]] = []
        self.stale = False
        self.weight_version = "default"
        self.url = ""
        self._faults: dict[str, list[Fault]] = defaultdict(list)
        self._updating = self._pushed = False
        self._running = asyncio.Event()
        self._loop = EventLoopThread()
        self._threads = ThreadPoolExecutor(4)

    def fail(self, route: str, times: int = 1, **fault: Any) -> None:
        """Have the next ``times`` requests of ``route`` go wrong, as the attributes of ``Fault`` say."""
        self._faults[route] += [Fault(**fault)] * times

    def __enter__(self) -> FakeVLLM:
        self._loop.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._runner.cleanup())
        self._loop.close()
        self._threads.shutdown(wait=False)

    async def _start(self) -> None:
        self._running.set()
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{route:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        route = request.path
        body = await request.json() if request.can_read_body else {}
        self.requests.append((route, body))
        fault = self._faults[route].pop(0) if self._faults[route] else Fault()
        await asyncio.sleep(fault.hang)
        if fault.status is not None:
            return failure(fault.status, fault.text)
        method = getattr(self, f"_{request.method.lower()}_{route.strip('/').replace('/', '_')}", None)
        if method is None:
            known = route == "/inference/v1/generate" and self.generate
            known = known or (route == "/v1/load_lora_adapter" and self.takes_adapters)
            return failure(405 if known else 404, "Method Not Allowed" if known else "Not Found")
        try:
            answer = await method(body)
        except web.HTTPException as error:
            return failure(error.status, error.text or "")
        except Exception as error:
            return failure(500, f"{type(error).__name__}: {error}")
        return web.json_response(fault.change(answer) if fault.change else answer, dumps=json.dumps)

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

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def failure(status: int, text: str) -> web.Response:
    """An error in vLLM's form."""
    return web.json_response({"error": {"message": text, "code": status}}, status=status)
