"""Weights of turns that look at student and teacher when rows are collected."""

from __future__ import annotations

from abc import abstractmethod

import lightning as L
from torch import Tensor
from typing_extensions import override

from sorl_lightning.callbacks.knob_setter import KnobSetter
from sorl_lightning.control import HasTeacher, HasTurnWeighting, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.turn_factors import (
    confidence_factors,
    decay_factors,
    disagreement_factors,
    drift_factors,
)
from sorl_lightning.types import TokenSignals


class Weighting(KnobSetter):
    """Multiplies the weights of the loss by factors; their sum stays what it was."""

    knob = "turn_weighting.factor"

    @abstractmethod
    def factors(self, signals: TokenSignals) -> Tensor:
        """Factor of each generated token, [B, T]."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and owner_of(HasTeacher, pl_module).teacher is None:  # type: ignore[type-abstract]
            raise ConfigurationError(f"{type(self).__name__} weighs turns by what a teacher says: set model.teacher")

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        owner_of(HasTurnWeighting, pl_module).turn_weighting.factor = self.factors  # type: ignore[type-abstract]

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        owner_of(HasTurnWeighting, pl_module).turn_weighting.factor = None  # type: ignore[type-abstract]


class TurnDecay(Weighting):
    """Turn t weighs kappa^t.

    Args:
        kappa: in (0, 1].
    """

    def __init__(self, kappa: float = 0.9) -> None:
        if not 0 < kappa <= 1:
            raise ConfigurationError(f"TurnDecay.kappa must be in (0, 1], got {kappa}")
        self.kappa = kappa

    @override
    def factors(self, signals: TokenSignals) -> Tensor:
        return decay_factors(signals.turn, self.kappa)


class ATODTurnWeights(Weighting):
    """1 - (1 - d)(1 - h) of each turn, with its disagreement d and the student's uncertainty h moved to [0, 1].

    Source: arXiv:2606.27814 (ATOD).
    """

    @override
    def factors(self, signals: TokenSignals) -> Tensor:
        return disagreement_factors(signals)


class SAGEOPD(Weighting):
    """Importance of each turn (0, .5 or 1) times the teacher's confidence.

    Args:
        weak: divergence of a turn, nats a token, below which it is skipped.
        strong: divergence from which on it counts fully.

    Source: arXiv:2606.19659 (SAGE-OPD); the two thresholds are our choice.
    """

    def __init__(self, weak: float = 0.1, strong: float = 0.5) -> None:
        if not 0 <= weak <= strong:
            raise ConfigurationError(f"SAGEOPD needs 0 <= weak <= strong, got {weak} and {strong}")
        self.weak = weak
        self.strong = strong

    @override
    def factors(self, signals: TokenSignals) -> Tensor:
        return confidence_factors(signals, self.weak, self.strong)


class PruneOPD(Weighting):
    """clip(1 - rate C, 0, 1) + .5, with C the tokens so far at which the top 16 of both models overlap too little.

    Args:
        threshold: overlap below which a token has drifted, in [0, 1].
        rate: what each such token takes from the factor, above 0.

    Source: arXiv:2605.07804 (Prune-OPD); that weights keep their sum is our choice.
    """

    def __init__(self, threshold: float = 0.7, rate: float = 0.01) -> None:
        if not 0 <= threshold <= 1 or not rate > 0:
            raise ConfigurationError(f"PruneOPD needs threshold in [0, 1] and rate above 0, got {threshold} and {rate}")
        self.threshold = threshold
        self.rate = rate

    @override
    def factors(self, signals: TokenSignals) -> Tensor:
        return drift_factors(signals, self.threshold, self.rate)
