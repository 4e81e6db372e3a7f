"""Decode one turn of many trajectories at once, and keep their keys and values for the next."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.errors import RolloutError
from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.kv_cache import RowCache, Rows
from sorl_lightning.rollout.engines.sampling import Sampler
from sorl_lightning.types import Completion, FinishReason

# Tokens of one prompt forward pass, padding included: on a CPU its activations should stay in the second-level cache.
PREFILL_TOKENS = {"cpu": 4096}
PREFILL_TOKENS_ELSEWHERE = 16384


class _Turn:
    """One request on its way.

    Attributes:
        cached: leading tokens of the prompt whose keys and values are in the cache.
    """

    def __init__(self, request: GenerationRequest, cached: int) -> None:
        self.request = request
        self.cached = cached
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None

    @property
    def last_position(self) -> int:
        """Position of the last token so far."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """Every token but the last, whose logits nobody has needed yet."""
        return (*self.request.prompt_ids, *self.token_ids[:-1])

    def append(self, token: int, logprob: float) -> None:
        """Take a token, and see whether it is the last."""
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


class TurnDecoder:
    """Batched decoding with a key-value cache that outlives the turn.

    Each trajectory has a row in the cache. A round decodes the next turn of all of them: of each prompt only the tokens
    after the longest prefix that is already cached are forwarded. Which row a trajectory sits in, and so every bit
    of the result, depends on the requests of this and earlier rounds alone.

    Args:
        model: the served model.
        max_batch: most trajectories in one forward pass.

    Attributes:
        forwarded_tokens: tokens that went through the model so far, padding not counted.
    """

    def __init__(self, model: PreTrainedModel, max_batch: int) -> None:
        self.model = model
        self.max_batch = max_batch
        self.forwarded_tokens = 0
        # transformers renames the argument; both names are in use among the versions supported.
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._cache = RowCache()
        self.clear()

    def clear(self) -> None:
        """Forget every key and value, but not how long sequences became: the next cache need not grow again."""
        self._cache = RowCache(self._cache.slots)
        self._seats: list[TrajectoryKey] = []
        self._cached_ids: dict[TrajectoryKey, tuple[int, ...]] = {}

    @torch.inference_mode()
    def decode(self, requests: Iterable[GenerationRequest], version: int) -> dict[TrajectoryKey, Completion]:
        """One turn for every request; trajectories without one are forgotten.

        Raises:
            RolloutError: the model computed NaN.
        """
        waiting = {request.trajectory: request for request in requests}
        try:
            self._seat(sorted(waiting))
            turns = [self._start(waiting[key]) for key in self._seats]
            for first in range(0, len(turns), self.max_batch):
                self._decode_batch(turns, first, min(first + self.max_batch, len(turns)))
        except BaseException:
            self.clear()
            raise
        self._cached_ids = {turn.request.trajectory: turn.cached_ids for turn in turns}
        return {turn.request.trajectory: turn.completion(version) for turn in turns}

    def _seat(self, trajectories: Sequence[TrajectoryKey]) -> None:
        """Give each trajectory a row: who had one below keeps it, the last ones move to rows left empty."""
        present = set(trajectories)
        staying = sum(key in present for key in self._seats)
        empty = [row for row, key in enumerate(self._seats[:staying]) if key not in present]
        moving = [row for row, key in enumerate(self._seats) if row >= staying and key in present]
        length = max((len(self._cached_ids[self._seats[row]]) for row in moving), default=0)
        self._cache.copy_rows(moving, empty, length)
        for source, target in zip(moving, empty, strict=True):
            self._seats[target] = self._seats[source]
        del self._seats[staying:]
        self._cached_ids = {key: self._cached_ids[key] for key in self._seats}
        self._seats += [key for key in trajectories if key not in self._cached_ids]
        self._cache.reserve(len(self._seats), 0)

    def _start(self, request: GenerationRequest) -> _Turn:
        cached_ids = self._cached_ids.get(request.trajectory, ())
        # The last token is forwarded in any case: its logits start the turn.
        return _Turn(request, min(common_prefix(cached_ids, request.prompt_ids), len(request.prompt_ids) - 1))

    def _decode_batch(self, turns: list[_Turn], first: int, end: int) -> None:
        """Decode the turns in rows ``first`` to ``end``; ``turns`` stays in the order of the rows."""
        logits = self._prefill(turns, first, end)
        sampler = Sampler([turn.request for turn in turns[first:end]], self.model.device)
        while True:
            tokens, logprobs = sampler.draw(logits)
            for turn, token, logprob in zip(turns[first:end], tokens, logprobs, strict=True):
                if turn.finish_reason is None:
                    check_number(logprob, turn)
                    turn.append(token, logprob)
            active = [row for row in range(first, end) if turns[row].finish_reason is None]
            if not active:
                break
            if 2 * len(active) <= end - first:
                sampler.keep([row - first for row in self._gather(turns, first, active)])
                end = first + len(active)
            logits = self._step(turns[first:end], first)
            self.forwarded_tokens += len(active)

    def _prefill(self, turns: Sequence[_Turn], first: int, end: int) -> Float[Tensor, "B V"]:
        """Forward what is new in each prompt; the logits after it."""
        self._cache.reserve(0, max(len(turn.request.prompt_ids) for turn in turns[first:end]))
        groups = list(prefill_groups(turns, range(first, end), self.model.device))
        logits = [self._forward_prompts([turns[row] for row in rows], rows) for rows in groups]
        if len(groups) == 1:
            return logits[0]
        order = torch.tensor([row for rows in groups for row in rows], device=self.model.device)
        return torch.cat(logits)[order.argsort()]

    def _forward_prompts(self, turns: Sequence[_Turn], rows: Sequence[int]) -> Float[Tensor, "B V"]:
        new = [turn.request.prompt_ids[turn.cached :] for turn in turns]
        width = max(map(len, new))
        # Padding goes to the left, so that one column holds every last token; the cache does not mind where a token
        # stands in the batch. A padding token sees position 0 and writes where nobody looks.
        padding = [width - len(ids) for ids in new]
        ids = [(0,) * pad + own for pad, own in zip(padding, new, strict=True)]
        positions = [
            (0,) * pad + tuple(range(turn.cached, len(turn.request.prompt_ids)))
            for pad, turn in zip(padding, turns, strict=True)
        ]
        self.forwarded_tokens += sum(map(len, new))
        return self._forward(rows, ids, positions, padding)

    def _step(self, turns: Sequence[_Turn], first: int) -> Float[Tensor, "B V"]:
        """Forward the last token of each turn. A finished turn still in the batch repeats its last, to no effect."""
        self._cache.reserve(0, max(turn.last_position for turn in turns) + 1)
        ids = [(turn.token_ids[-1],) for turn in turns]
        positions = [(turn.last_position,) for turn in turns]
        return self._forward(range(first, first + len(turns)), ids, positions, None)

    def _forward(
        self,
        rows: Sequence[int],
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        padding: Sequence[int] | None,
    ) -> Float[Tensor, "B V"]:
        """Logits after the last token of each row; ``padding`` counts the tokens before a row's first."""
        device, dtype = self.model.device, self.model.dtype
        position_ids = torch.tensor(positions, device=device)
        length = max(row[-1] for row in positions) + 1
        slots = position_ids
        if padding is not None and any(padding):
            column = torch.arange(position_ids.shape[1], device=device)
            is_padding = column < torch.tensor(padding, device=device)[:, None]
            slots = position_ids.masked_fill(is_padding, self._cache.padding_slot)
        visible = torch.arange(length, device=device) <= position_ids[:, None, :, None]
        zero = torch.zeros((), dtype=dtype, device=device)
        self._cache.aim(Rows.of(rows, device), slots, length)
        output = self.model(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.where(visible, zero, -torch.inf),
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        return output.logits[:, -1]

    def _gather(self, turns: list[_Turn], first: int, active: Sequence[int]) -> list[int]:
        """Move the active turns to the front by swapping rows; the rows that they came from, in their new order."""
        front = range(first, first + len(active))
        finished = [row for row in front if turns[row].finish_reason is not None]
        behind = [row for row in active if row >= front.stop]
        if not behind:
            return list(front)
        length = max(turns[row].last_position for row in (*finished, *behind))
        self._cache.copy_rows([*finished, *behind], [*behind, *finished], length)
        order = list(front)
        for left, right in zip(finished, behind, strict=True):
            order[left - first] = right
            turns[left], turns[right] = turns[right], turns[left]
            self._seats[left], self._seats[right] = self._seats[right], self._seats[left]
        return order


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest prefix that both share."""
    if right[: len(left)] == left:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def prefill_groups(turns: Sequence[_Turn], rows: Sequence[int], device: torch.device) -> Iterator[Sequence[int]]:
    """Rows to forward together: of similar numbers of new tokens, so that little is padding, and not too many.

    Rows that are neighbours in a group spare the cache a copy.
    """
    new = {row: len(turns[row].request.prompt_ids) - turns[row].cached for row in rows}
    budget = PREFILL_TOKENS.get(device.type, PREFILL_TOKENS_ELSEWHERE)
    waiting = sorted(rows, key=lambda row: new[row])
    while waiting:
        size = 1
        while size < len(waiting) and (size + 1) * new[waiting[size]] <= budget:
            size += 1
        yield sorted(waiting[:size])
        waiting = waiting[size:]


def check_number(logprob: float, turn: _Turn) -> None:
    """Refuse NaN.

    Raises:
        RolloutError: names the trajectory.
    """
    if logprob != logprob:
        key = turn.request.trajectory
        raise RolloutError(
            f"the policy's logits hold NaN at token {len(turn.token_ids)} of a turn of task {key.task}, "
            f"sibling {key.sibling}: its weights are broken, or its precision is too low"
        )
