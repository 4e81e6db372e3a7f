"""What one update's clipping took from its gradient, collected over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from sorl_lightning import ranks
from sorl_lightning.callbacks.gradients import (
    Gradients,
    added,
    gradients_of,
    has_clipped,
    norm,
    other_terms,
    rest_norm,
)
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.types import LossTerms, RolloutBatch


def check_trainer(trainer: L.Trainer, name: str) -> None:
    """Refuse trainers under which a second backward pass has no meaning, in the name of callback ``name``.

    Raises:
        ConfigurationError: DDP, or a loss scaler.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        raise ConfigurationError(
            f"{name} needs gradients that are averaged in every backward pass, which trainer.strategy ddp does once: "
            "use FSDP2, --config sorl:strategy/fsdp2"
        )
    if trainer.precision == "16-mixed":
        raise ConfigurationError(
            f"{name} needs gradients that no loss scaler has touched: use trainer.precision bf16-mixed or 32-true, not "
            "16-mixed"
        )


class ClippedUpdate:
    """The clipping bias C and the gradients that are not the policy's, of one update.

    Args:
        parameters: the policy's trainable ones.
        beside: trainable ones that are not the policy's.
        exact: C by a second backward pass; else its size by the surrogate of the tokens.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], beside: Sequence[nn.Parameter] = (), exact: bool = True
    ) -> None:
        self.parameters = parameters
        self.beside = beside
        self.exact = exact
        self.triggered = False
        self.factors: list[float] = []
        self._bias: Gradients | None = None
        self._others: Gradients | None = None
        self._squares = {"clip_bias": 0.0, "policy": 0.0}  # of the tokens' shares, for the surrogate
        self._tokens = 0
        self._trajectories: set[int] = set()

    def add(self, terms: LossTerms) -> None:
        """Take in a micro-batch, between its forward and its backward pass."""
        others = other_terms(terms)
        if others is not None:
            self._others = added(self._others, self._gradients_of(others))
        clipped = has_clipped(terms)
        self.triggered |= clipped
        if not self.exact and terms.clip_bias is not None:
            self._add_squares(terms)
        elif self.exact and clipped and terms.clip_bias is not None:
            self._bias = added(self._bias, self._gradients_of(terms.clip_bias))

    def add_by_trajectory(self, terms: LossTerms, batch: RolloutBatch) -> Iterator[tuple[Tensor, float]]:
        """The same; for each trajectory with a clipped token its tokens, and the size of its own C.

        Raises:
            ConfigurationError: a trajectory has rows in two micro-batches.
        """
        self.add(terms)
        ids = batch.trajectory[batch.generated].unique().tolist()
        if self._trajectories.intersection(ids):
            raise ConfigurationError(
                "ClippingTriggeredNormalization.level='trajectory' needs all rows of a trajectory in one micro-batch, "
                "and the chat template splits them: set data.micro_batches to 1, or level to 'batch'"
            )
        self._trajectories.update(ids)
        if not has_clipped(terms):
            return
        assert terms.clipped is not None
        assert terms.clip_bias_by_token is not None
        assert terms.weights is not None
        for number in ids:
            mask = (batch.trajectory == number) & batch.generated
            if bool(terms.clipped[mask].any()):
                share = terms.clip_bias_by_token[mask]
                size = norm(self._gradients_of(share.sum())) if self.exact else _surrogate(share)
                yield mask, size / float(terms.weights[mask].sum())

    def _gradients_of(self, term: Tensor) -> Gradients:
        return gradients_of(term, self.parameters, self.beside)

    def _add_squares(self, terms: LossTerms) -> None:
        assert terms.clip_bias_by_token is not None
        assert terms.policy_by_token is not None
        assert terms.weights is not None
        self._squares["clip_bias"] += float(terms.clip_bias_by_token.detach().square().sum())
        self._squares["policy"] += float(terms.policy_by_token.detach().square().sum())
        self._tokens += int((terms.weights != 0).sum())

    def bias_norm(self) -> float:
        """||C||, or its surrogate; 0 where nothing was clipped."""
        if not self.exact:
            return self._surrogate_of("clip_bias")
        return norm(self._bias) if self._bias is not None else 0.0

    def policy_norm(self) -> float:
        """L2 norm of the policy's part of the gradient, once all backward passes are done."""
        return rest_norm(self.parameters, self._others)

    def surrogate_norm(self) -> float:
        """The surrogate of the whole policy gradient: what that of later updates' C may be compared with."""
        return self._surrogate_of("policy")

    def _surrogate_of(self, name: str) -> float:
        squares, tokens = ranks.total(torch.tensor([self._squares[name], self._tokens], dtype=torch.float64)).tolist()
        return squares**0.5 * tokens

    def scale(self, factor: float) -> None:
        """Multiply the policy's part of the gradient."""
        if factor == 1.0:
            return
        others = self._others or [None] * len(self.parameters)
        for parameter, other in zip(self.parameters, others, strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
                if other is not None:
                    parameter.grad.add_(other, alpha=1 - factor)


def _surrogate(shares: Tensor) -> float:
    return float(torch.linalg.vector_norm(shares.detach())) * len(shares)
