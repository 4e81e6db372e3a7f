"""Generate in this process, with a copy of the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.engine import GenerationRequest, RolloutEngine, TrajectoryKey
from sorl_lightning.rollout.engines.batching import Batching
from sorl_lightning.rollout.engines.cached_model import CachedModel
from sorl_lightning.rollout.engines.continuous import Continuous
from sorl_lightning.rollout.engines.rounds import Rounds
from sorl_lightning.rollout.engines.served_policy import check_device, context_limit, copy_weights, eval_copy
from sorl_lightning.types import Completion

WayToBatch = Literal["rounds", "continuous"]


class LocalEngine(RolloutEngine):
    """Generates in process, with keys and values kept from turn to turn.

    In rounds: once every open trajectory has asked for its next turn, all turns are decoded. So the same requests give
    bitwise the same tokens, in whatever order they came. A trajectory whose request was cancelled is not waited for
    until it asks again.

    Continuously: a turn begins at the next token of those in flight, wherever ``max_batch`` leaves room, and is
    answered when it ends. Nobody waits for the slowest; which turns share a forward pass depends on the clock.

    Each request draws from its own seed, and its tokens depend on its company by float rounding only. Decoding has a
    thread of its own: the event loop, and the environments in it, go on meanwhile.
    At temperature 0 the reported log-probabilities are those at temperature 1.

    Args:
        max_batch: most trajectories in one forward pass; a larger round is decoded in several parts.
        dtype: type of the copy's weights; None: that of the policy.
        device: where to generate; None: where the first weights come from.
        batching: whether turns are decoded in rounds, or continuously.
    """

    def __init__(
        self,
        max_batch: int = 256,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        device: str | None = None,
        batching: WayToBatch = "rounds",
    ) -> None:
        if max_batch < 1:
            raise ConfigurationError(f"max_batch must be at least 1, got {max_batch}")
        if batching not in get_args(WayToBatch):
            raise ConfigurationError(f"batching must be one of {get_args(WayToBatch)}, got {batching!r}")
        self.max_batch = max_batch
        self.dtype = dtype
        self.device = device
        self.batching = batching
        self._batching: Batching | None = None

    @property
    def forwarded_tokens(self) -> int:
        """Tokens, of prompts and completions, that went through the model so far; padding not counted."""
        return 0 if self._batching is None else self._batching.model.forwarded_tokens

    def attach(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Copy the policy's architecture. Its weights come with ``load_weights``; of the tokenizer nothing is needed.

        Raises:
            ConfigurationError: a layer of the policy does not attend to its whole past, or there is no such device.
        """
        if self.device is not None:
            check_device(self.device)
        model = eval_copy(policy, getattr(torch, self.dtype) if self.dtype else None)
        self.close()
        ways: dict[str, type[Rounds] | type[Continuous]] = {"rounds": Rounds, "continuous": Continuous}
        self._batching = ways[self.batching](CachedModel(model), self.max_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, one tensor at a time, once no turn is in flight; cached keys and values are dropped.

        Args:
            weights: names as in the policy's ``state_dict``, and whole tensors.
            version: marks every token generated from now on.

        Raises:
            RuntimeError: the engine is not attached.
            ValueError: a name is unknown or missing, or a shape is wrong; nothing is generated until a load succeeds.
        """
        batching = self._attached()
        with batching.between_turns():
            served = batching.model
            served.clear()
            try:
                copy_weights(served.model, weights, self.device)
            except BaseException:
                served.version = None
                raise
            served.version = version

    def check_streaming(self) -> None:
        """Nothing is refused: the copy is the engine's own, and takes new weights when no turn is in flight."""
        return

    def drop_caches(self) -> None:
        """Forget cached keys and values: each trajectory's next turn forwards its whole prompt."""
        self._attached().drop_caches()

    def open(self, trajectory: TrajectoryKey) -> None:
        """Expect requests of this trajectory, until it is released: each round waits for it.

        Raises:
            RuntimeError: it is open already, or the engine is not attached.
        """
        self._attached().open(trajectory)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn.

        Raises:
            ConfigurationError: prompt and turn do not fit in the model's context.
            RolloutError: the model computed NaN.
            RuntimeError: there are no weights, or the trajectory is not open, or waits for another turn, or the engine
                is closed meanwhile.
        """
        batching = self._attached()
        if batching.model.version is None:
            raise RuntimeError("LocalEngine has no weights; call load_weights first")
        limit = context_limit(batching.model.model.config)
        if limit is not None and len(request.prompt_ids) + request.max_tokens > limit:
            raise ConfigurationError(
                f"{request.trajectory}: a prompt of {len(request.prompt_ids)} tokens and max_tokens="
                f"{request.max_tokens} exceed the model's max_position_embeddings={limit}; lower the context limit of "
                "the rollout"
            )
        return await batching.generate(request)

    def release(self, trajectory: TrajectoryKey) -> None:
        """Expect no more of this trajectory. One that is not open is ignored."""
        if self._batching is not None:
            self._batching.release(trajectory)

    def close(self) -> None:
        """Drop the model and its caches, and end the thread; requests on their way fail. Safe to call twice."""
        batching, self._batching = self._batching, None
        if batching is not None:
            batching.close()

    def _attached(self) -> Batching:
        if self._batching is None:
            raise RuntimeError("LocalEngine is not attached to a policy; call attach first")
        return self._batching
