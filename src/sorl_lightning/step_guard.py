"""Optimiser steps that must not be taken, on any rank."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_lightning import ranks
from sorl_lightning.errors import TrainingError


class StepGuard:
    """Decides, for all ranks together, whether the update in progress may change the weights.

    Attributes:
        skipped: steps skipped so far.
        in_a_row: steps skipped since the last one taken.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0
        self._finite = True
        self._tokens = 0
        self._reason: str | None = None

    def add(self, loss: Tensor, generated: Tensor) -> None:
        """Account for a micro-batch."""
        self._finite = self._finite and bool(torch.isfinite(loss))
        self._tokens += int(generated.sum())

    def sound(self, norm: Tensor) -> bool:
        """Whether the step may be taken, given the norm of its whole gradient; asked once an update."""
        infinite, tokens = ranks.total(torch.tensor([float(not self._finite), float(self._tokens)])).tolist()
        if infinite or not torch.isfinite(norm):
            self._reason = f"a loss or gradient is not finite (gradient norm {float(norm):g})"
        elif not tokens:
            self._reason = "no trajectory has a token to train"
        return self._reason is None

    def close(self, most: int) -> bool:
        """End the update; whether its step was taken.

        Raises:
            TrainingError: more than ``most`` steps in a row were skipped.
        """
        reason, self._reason, self._finite, self._tokens = self._reason, None, True, 0
        if reason is None:
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > most:
            raise TrainingError(
                f"{self.in_a_row} optimiser steps in a row were skipped, model.max_skipped_steps={most} are allowed: "
                f"{reason}. The weights are those of the last sound step; a smaller learning rate, gradient_clip_val, "
                "or precision 32-true may help"
            )
        return False

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue counting."""
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]
