"""What is logged of updates and collections; all ranks ask together and get the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import reduce
from operator import add

import torch
from torch import Tensor

from sorl_lightning import ranks
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.metrics import constant_groups, summarize
from sorl_lightning.tally import Tally
from sorl_lightning.types import LossTerms, RolloutBatch

WITH_MAXIMUM = ("ratio", "mismatch_kl")  # figures of tokens whose largest value is logged beside the mean


class UpdateFigures:
    """Figures of optimiser steps, each over all its micro-batches, on all ranks."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._start, self._tokens = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock of a collection's training."""
        self._start, self._tokens = time.perf_counter(), 0.0

    def add(self, batch: RolloutBatch, terms: LossTerms, by_token: Mapping[str, Tensor], policy_version: int) -> None:
        """Take in a micro-batch.

        Args:
            by_token: figures of each token, [B, T].
            policy_version: of the weights in training.
        """
        tally, mask = self._tally, batch.generated
        tally.add("tokens", mask.sum())
        tally.add("train/loss", terms.total)
        tally.add("train/policy_loss", terms.policy)
        if terms.value is not None:
            tally.add("train/value_loss", terms.value)
        tally.add_mean("train/staleness", (policy_version - batch.policy_version).float(), mask)
        tally.add_mean("train/advantage", batch.advantages, mask)
        tally.add_mean("train/advantage_variance", batch.advantages**2, mask)
        for name, values in by_token.items():
            tally.add_mean(f"train/{name}", values, mask)
            if name in WITH_MAXIMUM:
                tally.add_maximum(f"train/{name}_max", values, mask)
        if terms.clipped is not None:
            turns, touched = touched_turns(batch, terms.clipped)
            tally.add_mean("train/clip_fraction_turns", touched.float(), turns)

    def add_norms(self, norm: Tensor, clipped: Tensor) -> None:
        """Take in the norm of the whole gradient, before and after it was clipped."""
        self._tally.add_mean("train/grad_norm", norm)
        self._tally.add_mean("train/grad_norm_clipped", clipped)

    def flush(self) -> dict[str, Tensor]:
        """Figures of the step, whose micro-batches are all in, and trained tokens a second since ``begin``."""
        figures = self._tally.flush()
        self._tokens += float(figures.pop("tokens"))
        figures["train/advantage_variance"] -= figures["train/advantage"] ** 2
        figures["throughput/trained_tokens_per_second"] = torch.tensor(
            self._tokens / (time.perf_counter() - self._start)
        )
        return figures


def collection_figures(collection: Collection) -> dict[str, float]:
    """Figures of a training collection, this rank's share of which is ``collection``."""
    shares = ranks.gather((summarize(collection), constant_groups(collection.played)))
    summary = reduce(add, (summary for summary, _ in shares))
    groups = max(sum(share.terms for _, share in shares), 1)
    stream = {} if summary.stream is None else summary.stream.metrics
    return {
        **{f"rollout/{name}": value for name, value in [*summary.means.items(), *stream.items()]},
        "rollout/constant_groups": sum(share.total for _, share in shares) / groups,
        "rollout/discarded_groups": float(summary.discarded),
        "rollout/failed_groups": float(summary.failures),
        "rollout/dropped_trajectories": float(summary.dropped),
        "rollout/seconds": summary.seconds,
        "rollout/turn_limit": float(summary.turn_limit),
        "throughput/generated_tokens_per_second": summary.tokens / summary.seconds,
        "throughput/loop_pause_seconds": summary.loop_pause,
        "collection": float(collection.index),
    }


def evaluation_figures(collection: Collection) -> dict[str, float]:
    """Figures of held-out rollouts, this rank's share of which is ``collection``."""
    summary = reduce(add, ranks.gather(summarize(collection)))
    return {
        **summary.means,
        "failed_groups": float(summary.failures),
        "seconds": summary.seconds,
        "episodes": float(summary.trajectories),
    }


def touched_turns(batch: RolloutBatch, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """The last token of each turn, and whether a token of its turn was clipped, both bool [B, T]."""
    following = torch.nn.functional.pad(batch.turn[:, 1:], (0, 1), value=-2)
    last = batch.generated & (following != batch.turn)
    turns = last.flip(1).cumsum(1).flip(1) * batch.generated  # numbers the turns of a row from its end
    counts = turns.new_zeros(turns.shape[0], int(turns.max()) + 1)
    counts.scatter_add_(1, turns, clipped.long())
    return last, counts.gather(1, turns) > 0
