"""A turn that is being decoded, and what of it a forward pass takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sorl_lightning.errors import RolloutError
from sorl_lightning.rollout.engine import GenerationRequest
from sorl_lightning.rollout.engines.sampling import draw, uniforms
from sorl_lightning.types import Completion, FinishReason


class OpenTurn:
    """One request on its way.

    Args:
        request: what to generate.
        cached: leading tokens of the prompt whose keys and values are in the cache.
    """

    def __init__(self, request: GenerationRequest, cached: int) -> None:
        self.request = request
        self.cached = cached
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.uniforms = uniforms(request.seed)

    @property
    def new_ids(self) -> tuple[int, ...]:
        """The part of the prompt that is still to be forwarded."""
        return self.request.prompt_ids[self.cached :]

    @property
    def forwarded_ids(self) -> tuple[int, ...]:
        """Every token but the last, whose logits nobody has needed yet."""
        return (*self.request.prompt_ids, *self.token_ids[:-1])

    @property
    def last_position(self) -> int:
        """Position of the last token so far."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def append(self, token: int, logprob: float) -> None:
        """Take a token, and see whether it is the last.

        Raises:
            RolloutError: the log-probability is NaN.
        """
        if logprob != logprob:
            key = self.request.trajectory
            raise RolloutError(
                f"the policy's logits hold NaN at token {len(self.token_ids)} of a turn of task {key.task}, sibling "
                f"{key.sibling}: its weights are broken, or its precision is too low"
            )
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_tokens:
            self.finish_reason = "length"

    def completion(self, version: int) -> Completion:
        """The finished turn."""
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=(version,) * len(self.token_ids),
        )


def draw_tokens(turns: Sequence[OpenTurn], logits: Float[Tensor, "B V"]) -> None:
    """Append to each turn that goes on its next token, drawn with the request's own numbers.

    At temperature 0 it is the most likely one, and its log-probability that at temperature 1.

    Raises:
        RolloutError: the logits hold NaN.
    """
    uniform = torch.tensor([next(turn.uniforms) for turn in turns], dtype=torch.float64, device=logits.device)
    temperature = torch.tensor([turn.request.temperature for turn in turns], device=logits.device)
    greedy = temperature == 0
    tokens, logprobs = draw(logits, uniform, temperature.masked_fill(greedy, 1.0), greedy)
    for turn, token, logprob in zip(turns, tokens.tolist(), logprobs.tolist(), strict=True):
        if turn.finish_reason is None:
            turn.append(token, logprob)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens for one forward pass, one list for each row of the cache.

    Attributes:
        rows: row of the cache of each list.
        ids: tokens, padded on the left to one length.
        positions: position of each token; 0 for padding.
        padding: padding tokens at the start of each list.
    """

    rows: Sequence[int]
    ids: Sequence[Sequence[int]]
    positions: Sequence[Sequence[int]]
    padding: Sequence[int]

    @classmethod
    def of_prompts(cls, turns: Sequence[OpenTurn], rows: Sequence[int]) -> TokenBatch:
        """What is new in the prompts of ``turns``, which sit in ``rows``.

        Padding goes to the left so that one column holds every last token; the cache does not mind where in the batch a
        token stands.
        """
        width = max(len(turn.new_ids) for turn in turns)
        padding = [width - len(turn.new_ids) for turn in turns]
        padded = list(zip(turns, padding, strict=True))
        ids = [(0,) * pad + turn.new_ids for turn, pad in padded]
        positions = [(0,) * pad + tuple(range(turn.cached, len(turn.request.prompt_ids))) for turn, pad in padded]
        return cls(rows, ids, positions, padding)

    @classmethod
    def of_last_tokens(cls, turns: Sequence[OpenTurn], rows: Sequence[int]) -> TokenBatch:
        """The last token of each turn. A finished turn among them repeats its last, to no effect."""
        ids = [(turn.token_ids[-1],) for turn in turns]
        return cls(rows, ids, [(turn.last_position,) for turn in turns], [0] * len(turns))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest prefix that both share."""
    if right[: len(left)] == left:
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def group_by_length(lengths: dict[int, int], budget: int) -> Iterator[list[int]]:
    """Rows to forward together: of similar lengths, so that little is padding, and not too many.

    Rows that are neighbours in a group spare the cache a copy, so each group is sorted.

    Args:
        lengths: new tokens of each row.
        budget: most tokens of a group, padding included; a row that is longer goes alone.
    """
    waiting = sorted(lengths, key=lengths.__getitem__)
    while waiting:
        size = 1
        while size < len(waiting) and (size + 1) * lengths[waiting[size]] <= budget:
            size += 1
        yield sorted(waiting[:size])
        waiting = waiting[size:]
