"""Decode one turn of many trajectories at once, and keep their keys and values for the next."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.kv_cache import RowCache, Rows
from sorl_lightning.rollout.engines.open_turn import OpenTurn, TokenBatch, common_prefix, group_by_length
from sorl_lightning.rollout.engines.sampling import Sampler
from sorl_lightning.types import Completion

# Tokens of one forward pass over prompts, padding included: bounds the memory of activations and of the mask.
CPU_PROMPT_TOKENS = 2048
GPU_PROMPT_TOKENS = 16384


class TurnDecoder:
    """Batched decoding with a key-value cache that outlives the turn.

    Each trajectory has a row in the cache. A round decodes the next turn of all of them: of each prompt only the tokens
    after the longest prefix that is already cached are forwarded, and a fresh prompt that several share only once.
    Which row a trajectory sits in, and so every bit of the result, depends on this and earlier rounds' requests alone.

    Args:
        model: the served model.
        max_batch: most trajectories in one forward pass.

    Attributes:
        lock: held by whoever decodes or changes the model's weights, which may be two threads.
        version: of the model's weights; None: there are none.
        forwarded_tokens: tokens that went through the model so far, padding not counted.
    """

    def __init__(self, model: PreTrainedModel, max_batch: int) -> None:
        self.model = model
        self.max_batch = max_batch
        self.lock = threading.RLock()
        self.version: int | None = None
        self.forwarded_tokens = 0
        self._stopped = False
        # transformers renamed the argument; both names are in use among the versions supported.
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._cache = RowCache()
        self.clear()

    def clear(self) -> None:
        """Forget every key and value, but not how long sequences became: the next cache need not grow again."""
        with self.lock:
            self._cache = RowCache(self._cache.slots)
            self._seats: list[TrajectoryKey] = []
            self._cached_ids: dict[TrajectoryKey, tuple[int, ...]] = {}

    def stop(self) -> None:
        """Decode no more: a turn that another thread is at ends with an error at its next token."""
        self._stopped = True

    def decode(self, requests: Iterable[GenerationRequest]) -> dict[TrajectoryKey, Completion]:
        """One turn for every request; trajectories without one are forgotten.

        Raises:
            RolloutError: the model computed NaN.
            RuntimeError: there are no weights, or ``stop`` was called.
        """
        with self.lock, torch.inference_mode():
            if self.version is None:
                raise RuntimeError("LocalEngine has no weights; call load_weights first")
            return self._decode(requests, self.version)

    def _decode(self, requests: Iterable[GenerationRequest], version: int) -> dict[TrajectoryKey, Completion]:
        waiting = {request.trajectory: request for request in requests}
        try:
            self._seat(sorted(waiting))
            turns = [self._start(waiting[key]) for key in self._seats]
            for first in range(0, len(turns), self.max_batch):
                self._decode_batch(turns, first, min(first + self.max_batch, len(turns)))
        except BaseException:
            self.clear()
            raise
        self._cached_ids = {turn.request.trajectory: turn.forwarded_ids for turn in turns}
        return {turn.request.trajectory: turn.completion(version) for turn in turns}

    def _seat(self, trajectories: Sequence[TrajectoryKey]) -> None:
        """Give each trajectory a row: most keep theirs, the last ones move to rows left empty, new ones follow."""
        present = set(trajectories)
        staying = sum(key in present for key in self._seats)
        empty = [row for row, key in enumerate(self._seats[:staying]) if key not in present]
        moving = [row for row, key in enumerate(self._seats) if row >= staying and key in present]
        length = max((len(self._cached_ids[self._seats[row]]) for row in moving), default=0)
        self._cache.copy_rows(moving, empty, length)
        for source, target in zip(moving, empty, strict=True):
            self._seats[target] = self._seats[source]
        del self._seats[staying:]
        self._seats += sorted(present.difference(self._seats))
        self._cache.reserve(len(self._seats), 0)

    def _start(self, request: GenerationRequest) -> OpenTurn:
        cached = common_prefix(self._cached_ids.get(request.trajectory, ()), request.prompt_ids)
        # The last token is forwarded in any case: its logits start the turn.
        return OpenTurn(request, min(cached, len(request.prompt_ids) - 1))

    def _decode_batch(self, turns: list[OpenTurn], first: int, end: int) -> None:
        """Decode the turns in rows ``first`` to ``end``; ``turns`` stays in the order of the rows."""
        logits = self._forward_prompts(turns, range(first, end))
        sampler = Sampler([turn.request for turn in turns[first:end]], self.model.device)
        while True:
            tokens, logprobs = sampler.draw(logits)
            for turn, token, logprob in zip(turns[first:end], tokens, logprobs, strict=True):
                if turn.finish_reason is None:
                    turn.append(token, logprob)
            active = [row for row in range(first, end) if turns[row].finish_reason is None]
            if not active:
                break
            if 2 * len(active) <= end - first:
                sampler.keep([row - first for row in self._gather(turns, first, active)])
                end = first + len(active)
            self.forwarded_tokens += len(active)
            logits = self._forward(TokenBatch.of_last_tokens(turns[first:end], range(first, end)))

    def _forward_prompts(self, turns: Sequence[OpenTurn], rows: Sequence[int]) -> Float[Tensor, "B V"]:
        """Logits after each prompt. Siblings open with one prompt: it is forwarded once, and its cache copied."""
        leaders: dict[tuple[int, ...], int] = {}
        leader = {
            row: row if turns[row].cached else leaders.setdefault(turns[row].request.prompt_ids, row) for row in rows
        }
        followers = [row for row in rows if leader[row] != row]
        lengths = {row: len(turns[row].new_ids) for row in rows if leader[row] == row}
        budget = CPU_PROMPT_TOKENS if self.model.device.type == "cpu" else GPU_PROMPT_TOKENS
        groups = list(group_by_length(lengths, budget))
        logits = torch.cat(
            [self._forward(TokenBatch.of_prompts([turns[row] for row in group], group)) for group in groups]
        )
        length = max((len(turns[row].request.prompt_ids) for row in followers), default=0)
        self._cache.copy_rows([leader[row] for row in followers], followers, length)
        self.forwarded_tokens += sum(lengths.values())
        place = {row: i for i, row in enumerate(row for group in groups for row in group)}
        return logits[[place[leader[row]] for row in rows]]

    def _forward(self, batch: TokenBatch) -> Float[Tensor, "B V"]:
        """Logits after the last token of each row."""
        if self._stopped:
            raise RuntimeError("LocalEngine was closed while a turn was decoded")
        device = self.model.device
        length = max(positions[-1] for positions in batch.positions) + 1
        positions = torch.tensor(batch.positions, device=device)
        slots = positions
        self._cache.reserve(0, length)
        if any(batch.padding):
            # Padding sees position 0, and writes where nobody looks.
            column = torch.arange(positions.shape[1], device=device)
            padding = column < torch.tensor(batch.padding, device=device)[:, None]
            slots = positions.masked_fill(padding, self._cache.padding_slot)
        self._cache.aim(Rows.of(batch.rows, device), slots, length)
        visible = torch.arange(length, device=device) <= positions[:, None, :, None]
        output = self.model(
            input_ids=torch.tensor(batch.ids, device=device),
            attention_mask=torch.where(visible, torch.zeros((), dtype=self.model.dtype, device=device), -torch.inf),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        return output.logits[:, -1]

    def _gather(self, turns: list[OpenTurn], first: int, active: Sequence[int]) -> list[int]:
        """Move the active turns to the front by swapping rows; the rows that they came from, in their new order."""
        front = range(first, first + len(active))
        finished = [row for row in front if turns[row].finish_reason is not None]
        behind = [row for row in active if row >= front.stop]
        length = max((turns[row].last_position for row in (*finished, *behind)), default=0)
        self._cache.copy_rows([*finished, *behind], [*behind, *finished], length)
        order = list(front)
        for left, right in zip(finished, behind, strict=True):
            order[left - first] = right
            turns[left], turns[right] = turns[right], turns[left]
            self._seats[left], self._seats[right] = self._seats[right], self._seats[left]
        return order
