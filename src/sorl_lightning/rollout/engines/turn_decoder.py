"""Decode one turn of many trajectories at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.engines.cached_model import CachedModel, in_front
from sorl_lightning.rollout.engines.open_turn import OpenTurn, draw_tokens
from sorl_lightning.types import Completion


class TurnDecoder:
    """Decodes in rounds: the next turn of all trajectories that there are.

    Which row a trajectory sits in, and so every bit of the result, depends on this and earlier rounds' requests alone.

    Args:
        model: computes, and keeps keys and values.
        max_batch: most trajectories in one forward pass.
    """

    def __init__(self, model: CachedModel, max_batch: int) -> None:
        self.model = model
        self.max_batch = max_batch

    def decode(self, requests: Iterable[GenerationRequest]) -> dict[TrajectoryKey, Completion]:
        """One turn for every request; trajectories without one are forgotten.

        Raises:
            RolloutError: the model computed NaN.
            RuntimeError: there are no weights, or the model was stopped.
        """
        with self.model.lock, torch.inference_mode():
            if self.model.version is None:
                raise RuntimeError("LocalEngine has no weights; call load_weights first")
            try:
                turns = self._decode({request.trajectory: request for request in requests})
            except BaseException:
                self.model.clear()
                raise
            return {turn.request.trajectory: turn.completion(self.model.version) for turn in turns}

    def _decode(self, requests: dict[TrajectoryKey, GenerationRequest]) -> list[OpenTurn]:
        model = self.model
        staying = [key for key in in_front(model.seats, requests) if key in requests]
        model.arrange(staying + sorted(requests.keys() - set(staying)))
        turns = [model.start(requests[key]) for key in model.seats]
        for first in range(0, len(turns), self.max_batch):
            self._decode_batch(turns, first, min(first + self.max_batch, len(turns)))
        model.cached_ids = {turn.request.trajectory: turn.forwarded_ids for turn in turns}
        return turns

    def _decode_batch(self, turns: list[OpenTurn], first: int, end: int) -> None:
        """Decode the turns in rows ``first`` to ``end``; ``turns`` stays in the order of the rows."""
        logits = self.model.read_prompts({row: turns[row] for row in range(first, end)})
        while True:
            draw_tokens(turns[first:end], logits)
            active = sum(turn.finish_reason is None for turn in turns[first:end])
            if not active:
                break
            if 2 * active <= end - first:
                self._gather(turns, first, end)
                end = first + active
            logits = self.model.read_last_tokens({row: turns[row] for row in range(first, end)})

    def _gather(self, turns: list[OpenTurn], first: int, end: int) -> None:
        """Move the active turns of a batch to its front by swapping rows."""
        model = self.model
        by_key = {turn.request.trajectory: turn for turn in turns[first:end]}
        model.cached_ids.update((key, turn.forwarded_ids) for key, turn in by_key.items())
        active = {key for key, turn in by_key.items() if turn.finish_reason is None}
        order = in_front(model.seats[first:end], active)
        model.arrange([*model.seats[:first], *order, *model.seats[end:]])
        turns[first:end] = [by_key[key] for key in order]
