"""Generate in this process, with a copy of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.engines.served_policy import check_device, context_limit, copy_weights, eval_copy
from sorl_lightning.rollout.engines.turn_decoder import TurnDecoder
from sorl_lightning.types import Completion


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: GenerationRequest
    completion: asyncio.Future[Completion]


class LocalEngine(RolloutEngine):
    """Generates in process, in rounds: once every open trajectory has asked for its next turn, all turns are decoded.

    So the same requests give bitwise the same tokens, in whatever order they came. Each request draws from its own
    seed, and its tokens depend on its company by float rounding only. Keys and values are kept from turn to turn.
    A trajectory whose request was cancelled is not waited for until it asks again.
    At temperature 0 the reported log-probabilities are those at temperature 1.

    Args:
        max_batch: most trajectories in one forward pass; a larger round is decoded in several parts.
        dtype: type of the copy's weights; None: that of the policy.
        device: where to generate; None: where the first weights come from.
    """

    def __init__(
        self,
        max_batch: int = 256,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        device: str | None = None,
    ) -> None:
        if max_batch < 1:
            raise ConfigurationError(f"max_batch must be at least 1, got {max_batch}")
        self.max_batch = max_batch
        self.dtype = dtype
        self.device = device
        self._decoder: TurnDecoder | None = None
        self._context_limit: int | None = None
        self._version: int | None = None
        self._open: set[TrajectoryKey] = set()
        self._withdrawn: set[TrajectoryKey] = set()
        self._waiting: dict[TrajectoryKey, _Waiting] = {}

    @property
    def forwarded_tokens(self) -> int:
        """Tokens, of prompts and completions, that went through the model so far; padding not counted."""
        return 0 if self._decoder is None else self._decoder.forwarded_tokens

    def attach(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Copy the policy's architecture. Its weights come with ``load_weights``; of the tokenizer nothing is needed.

        Raises:
            ConfigurationError: a layer of the policy does not attend to its whole past, or there is no such device.
        """
        if self.device is not None:
            check_device(self.device)
        model = eval_copy(policy, getattr(torch, self.dtype) if self.dtype else None)
        self._decoder = TurnDecoder(model, self.max_batch)
        self._context_limit = context_limit(model.config)
        self._version = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, one tensor at a time; cached keys and values are dropped.

        Args:
            weights: names as in the policy's ``state_dict``, and whole tensors.
            version: marks every token generated from now on.

        Raises:
            RuntimeError: the engine is not attached.
            ValueError: a name is unknown or missing, or a shape is wrong; nothing is generated until a load succeeds.
        """
        decoder = self._attached()
        with decoder.lock:
            self._version = None
            decoder.clear()
            copy_weights(decoder.model, weights, self.device)
            self._version = version

    def check_streaming(self) -> None:
        """Nothing is refused: the copy is the engine's own, and takes new weights between two rounds."""
        return

    def drop_caches(self) -> None:
        """Forget cached keys and values: each trajectory's next turn forwards its whole prompt."""
        self._attached().clear()

    def open(self, trajectory: TrajectoryKey) -> None:
        """Wait for this trajectory in every round, until it is released.

        Raises:
            RuntimeError: it is open already.
        """
        if trajectory in self._open:
            raise RuntimeError(f"{trajectory} is open already; release it first")
        self._open.add(trajectory)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn, in the next round.

        Raises:
            ConfigurationError: prompt and turn do not fit in the model's context.
            RolloutError: the model computed NaN.
            RuntimeError: there are no weights, or the trajectory is not open, or waits for another turn.
        """
        key = request.trajectory
        self._check(request)
        completion = asyncio.get_running_loop().create_future()
        self._waiting[key] = _Waiting(request, completion)
        self._withdrawn.discard(key)
        self._schedule_round()
        try:
            return await completion
        except asyncio.CancelledError:
            if completion.cancelled():
                del self._waiting[key]
            if key in self._open:
                self._withdrawn.add(key)
            self._schedule_round()
            raise

    def release(self, trajectory: TrajectoryKey) -> None:
        """Wait for this trajectory no longer. One that is not open is ignored."""
        self._open.discard(trajectory)
        self._withdrawn.discard(trajectory)
        if not self._open and self._decoder is not None:
            self._decoder.clear()
        self._schedule_round()

    def close(self) -> None:
        """Drop the model and its caches; requests still waiting fail."""
        for waiting in self._waiting.values():
            if not waiting.completion.done():
                waiting.completion.set_exception(RuntimeError("LocalEngine was closed while a turn was waited for"))
        self._waiting.clear()
        self._decoder = None
        self._version = None
        self._open.clear()
        self._withdrawn.clear()

    def _attached(self) -> TurnDecoder:
        if self._decoder is None:
            raise RuntimeError("LocalEngine is not attached to a policy; call attach first")
        return self._decoder

    def _check(self, request: GenerationRequest) -> None:
        key = request.trajectory
        with self._attached().lock:
            if self._version is None:
                raise RuntimeError("LocalEngine has no weights; call load_weights first")
        if key not in self._open:
            raise RuntimeError(f"{key} is not open; open it before its first request")
        if key in self._waiting:
            raise RuntimeError(f"{key} waits for a turn already")
        limit = self._context_limit
        if limit is not None and len(request.prompt_ids) + request.max_tokens > limit:
            raise ConfigurationError(
                f"{key}: a prompt of {len(request.prompt_ids)} tokens and max_tokens={request.max_tokens} exceed the "
                f"model's max_position_embeddings={limit}; lower the context limit of the rollout"
            )

    def _ready(self) -> list[_Waiting]:
        """Every request of the next round, empty while a trajectory is still to be waited for."""
        waiting = [w for _, w in sorted(self._waiting.items()) if not w.completion.done()]
        return waiting if len(waiting) >= len(self._open) - len(self._withdrawn) else []

    def _schedule_round(self) -> None:
        if len(self._waiting) >= len(self._open) - len(self._withdrawn):
            for waiting in self._waiting.values():
                # On the loop and not here: whoever closes the round is no different from the others.
                waiting.completion.get_loop().call_soon(self._run_round)
                break

    def _run_round(self) -> None:
        ready = self._ready()
        if not ready:
            return
        self._waiting.clear()
        try:
            completions = self._decode([waiting.request for waiting in ready])
        except Exception as error:
            for waiting in ready:
                waiting.completion.set_exception(error)
            return
        for waiting in ready:
            waiting.completion.set_result(completions[waiting.request.trajectory])

    def _decode(self, requests: list[GenerationRequest]) -> dict[TrajectoryKey, Completion]:
        decoder = self._attached()
        with decoder.lock:
            if self._version is None:
                raise RuntimeError("LocalEngine has no weights; call load_weights first")
            return decoder.decode(requests, self._version)
