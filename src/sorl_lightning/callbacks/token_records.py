"""What training says of each token of a few trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sorl_lightning.types import RolloutBatch, Trajectory, Turn

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says of a character some of whose bytes are missing


class TokenRecords:
    """Keeps the figures of chosen trajectories' tokens out of the micro-batches of a collection.

    A token that is trained again, in a later pass, has its last figures.

    Args:
        chosen: numbers of the trajectories, as the rows' ``trajectory`` has them.
    """

    def __init__(self, chosen: Sequence[int]) -> None:
        self.chosen = torch.tensor(list(chosen), dtype=torch.long)
        self.update: dict[int, int] = {}
        self._turns: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def add(self, batch: RolloutBatch, figures: Mapping[str, Tensor], update: int) -> None:
        """Take in one micro-batch of the ``update``-th optimiser step of the collection; no graph is kept."""
        kept = torch.isin(batch.trajectory, self.chosen.to(batch.trajectory.device)) & batch.generated
        if not kept.any():
            return
        columns = {"advantage": batch.advantages, **figures}
        held = {name: values.detach()[kept].float().cpu().numpy() for name, values in columns.items()}
        if "clip_fraction" in held:
            held["clipped"] = held.pop("clip_fraction").astype(np.uint8)
        # A turn never spans rows, so that its tokens stand one after the other.
        owners = torch.stack([batch.trajectory[kept], batch.turn[kept]], dim=1)
        turns, counts = owners.unique_consecutive(dim=0, return_counts=True)
        ends = counts.cumsum(0)[:-1].tolist()
        parts = {name: np.split(values, ends) for name, values in held.items()}
        for place, (trajectory, turn) in enumerate(turns.tolist()):
            self._turns[trajectory, turn] = {name: values[place] for name, values in parts.items()}
            self.update[trajectory] = update

    def of(self, trajectory: int, turn: int) -> Mapping[str, np.ndarray]:
        """Figures of a turn's tokens, each [tokens]; none where it was not trained."""
        return self._turns.get((trajectory, turn), {})


def record_of(
    trajectory: Trajectory, number: int, records: TokenRecords, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """A trajectory as a line of the log, less what is said of its collection; docs/trajectory_log.md has the fields."""
    return {
        "task": trajectory.task.id,
        "group": trajectory.group,
        "sibling": trajectory.sibling,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "ending": trajectory.ending.value,
        "turn_limit": trajectory.turn_limit,
        "metrics": dict(trajectory.metrics),
        "update": records.update.get(number),
        "prompt": text_of(tokenizer, trajectory.turns[0].prompt_ids) if trajectory.turns else "",
        "turns": [turn_record(turn, records.of(number, turn.index), tokenizer) for turn in trajectory.turns],
    }


def turn_record(turn: Turn, figures: Mapping[str, np.ndarray], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """One turn, its tokens by columns."""
    completion = turn.completion
    tokens = len(completion.token_ids)
    return {
        "index": turn.index,
        "author": turn.author,
        "prompt_tokens": len(turn.prompt_ids),
        "text": turn.text,
        "observation": turn.observation,
        "reward": turn.reward,
        "seconds": turn.seconds,
        "finish_reason": completion.finish_reason,
        "tokens": {
            "id": completion.token_ids,
            "piece": pieces(tokenizer, completion.token_ids),
            "logprob": np.array(completion.logprobs, dtype=np.float32),
            "policy_version": completion.policy_version,
            "mask": [int(bool(figures))] * tokens,
            **figures,
        },
    }


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Tokens as text, special ones included."""
    return str(tokenizer.decode(list(ids)))


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, which joined are the text of all.

    A character that several tokens share is the last one's. Each step decodes a few tokens only: those since the last
    two whole pieces.
    """
    added: list[str] = []
    start = shown = 0
    for end in range(1, len(ids) + 1):
        before, whole = text_of(tokenizer, ids[start:shown]), text_of(tokenizer, ids[start:end])
        if whole.endswith(UNFINISHED) and end < len(ids):
            added.append("")
            continue
        added.append(whole[len(before) :])
        start, shown = shown, end
    return added
