"""What generates: tokens in, tokens out."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.interfaces import Interface
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.types import Completion


class TrajectoryKey(NamedTuple):
    """Which trajectory of a collection; sorts by task, then sibling."""

    task: int
    sibling: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One turn to generate.

    Attributes:
        trajectory: whose turn it is; engines keep what they know of a trajectory (its KV cache) under this key.
        prompt_ids: the full prompt, never empty.
        max_tokens: most tokens to generate, at least 1; the stop token counts.
        stop_token_ids: tokens that end the turn.
        temperature: sampling temperature; 0 takes the most likely token.
        seed: seed of this request alone, so that its tokens do not depend on what else is in flight.
        environment: the running episode, for engines that act on its state (an expert); language models ignore it.
    """

    trajectory: TrajectoryKey
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float
    seed: int
    environment: Environment


class RolloutEngine(Interface):
    """Generates turns. A trajectory is opened before its first request and released after its last."""

    @abstractmethod
    def attach(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Meet the policy to be served, once, before the first weights arrive."""
        ...

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; every token generated afterwards carries ``version``."""
        ...

    @abstractmethod
    def open(self, trajectory: TrajectoryKey) -> None:
        """A trajectory starts; it will keep sending requests until it is released."""
        ...

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one turn."""
        ...

    @abstractmethod
    def release(self, trajectory: TrajectoryKey) -> None:
        """A trajectory has ended; forget it."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Give back memory and processes. Safe to call twice."""
        ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all ``parts`` and on nothing else.

    >>> derive_seed(0, "train", 3) == derive_seed(0, "train", 3) != derive_seed(0, "train", 4)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
