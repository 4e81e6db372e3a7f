"""Roll out as deep as the divergence and the successes reach."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from sorl_lightning import ranks
from sorl_lightning.callbacks.knob_setter import KnobSetter
from sorl_lightning.control import HasRolloutBudget, HasTurnStatistics, RolloutBudget, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.depth import Coverage, DepthState, cap, is_probe, observe
from sorl_lightning.types import Trajectory, TurnStatistics


class RolloutDepthController(KnobSetter):
    """Cap the turns of training rollouts by what probes, rolled out to full depth, show.

    Probes are collections 1 to ``warmup`` and every ``interval``-th; they train like any other, and they alone move the
    controller. Without a teacher the divergence counts as 0, and the coverage of successes decides. Validation is
    never capped. With streaming (``data.max_staleness`` 1) a probe is looked at when it is trained, one collection
    after it was started.

    Args:
        warmup: first collections that are all probes.
        interval: collections from one later probe to the next.
        quantile: share of successes that the depth must cover, in (0, 1].
        min_successes: fewest successes in a probe that its coverage is read from.
        smoothing: weight of a probe in the moving average, in (0, 1].
        h_min: least cap, turns.
        h_max: depth of probes and largest cap, turns; None is ``data.max_turns``.
        coverage: whose last turns are covered: those of successes or of all trajectories.
        cov_slack: turns added to the coverage; 1 is the literal reading of the paper's 1-based formula.
        fallback_after: probes in a row without enough successes after which all trajectories stand in; None: never.
        fallback_quantile: share of all trajectories to cover then.

    Source: Zhou et al. 2026, arXiv:2607.05804, sec. 5.1; coverage of all, slack and fallback are ours.
    """

    knob = "rollout_budget.max_turns"

    def __init__(
        self,
        warmup: int = 3,
        interval: int = 8,
        quantile: float = 0.8,
        min_successes: int = 8,
        smoothing: float = 0.3,
        h_min: int = 2,
        h_max: int | None = None,
        coverage: Coverage = "success",
        cov_slack: int = 0,
        fallback_after: int | None = None,
        fallback_quantile: float = 0.5,
    ) -> None:
        for name, value, least in (
            ("warmup", warmup, 0), ("interval", interval, 1), ("min_successes", min_successes, 1), ("h_min", h_min, 1),
            ("h_max", 1 if h_max is None else h_max, 1), ("cov_slack", cov_slack, 0),
            ("fallback_after", 1 if fallback_after is None else fallback_after, 1),
        ):  # fmt: skip
            if value < least:
                raise ConfigurationError(f"RolloutDepthController.{name} must be at least {least}, got {value}")
        for name, share in (("quantile", quantile), ("smoothing", smoothing), ("fallback_quantile", fallback_quantile)):
            if not 0 < share <= 1:
                raise ConfigurationError(f"RolloutDepthController.{name} must be in (0, 1], got {share}")
        if coverage not in ("success", "all"):
            raise ConfigurationError(f"RolloutDepthController.coverage must be success or all, got {coverage!r}")
        self.warmup = warmup
        self.interval = interval
        self.quantile = quantile
        self.min_successes = min_successes
        self.smoothing = smoothing
        self.h_min = h_min
        self.h_max = h_max
        self.coverage = coverage
        self.cov_slack = cov_slack
        self.fallback_after = fallback_after
        self.fallback_quantile = fallback_quantile
        self.state: DepthState | None = None
        self.iteration = 0
        self.history: list[int] = []
        self.probe_seconds = 0.0
        self.seconds_saved = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        staleness = trainer.datamodule.max_staleness  # type: ignore[attr-defined]
        if stage == "fit" and staleness > 1:
            raise ConfigurationError(
                f"RolloutDepthController looks at collections that are probes as a whole, and data.max_staleness="
                f"{staleness} mixes groups of several: set it to 1 or 0"
            )

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The depth of the collection about to be made; the same again after a resume."""
        self.iteration = trainer.current_epoch + 1
        self._budget(trainer).limit(self._allowed(self.iteration, trainer))

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at a probe, and allow the next collection its depth."""
        statistics = owner_of(HasTurnStatistics, pl_module).turn_statistics  # type: ignore[type-abstract]
        collection = trainer.datamodule.collection  # type: ignore[attr-defined]
        assert statistics is not None
        maximum = self._maximum(trainer)
        whole = not ranks.anywhere(any(not self._of_probe(t, maximum) for t in collection.trajectories))
        if whole:
            statistics = over_ranks(statistics, maximum)
            self.state = self._observed(self._state(trainer), statistics)
            self.probe_seconds = collection.seconds
        else:
            self.seconds_saved += self.probe_seconds - collection.seconds
        self.history.append(self._budget(trainer).max_turns)
        self._budget(trainer).limit(self._allowed(self.iteration + 1, trainer))
        self._log(trainer, pl_module, statistics, whole)

    def _of_probe(self, trajectory: Trajectory, maximum: int) -> bool:
        probe = is_probe(trajectory.started + 1, self.warmup, self.interval)
        return probe and trajectory.turn_limit >= maximum

    def _observed(self, state: DepthState, statistics: TurnStatistics) -> DepthState:
        return observe(
            state, statistics, self.quantile, self.min_successes, self.smoothing, self.coverage, self.cov_slack,
            self.fallback_after, self.fallback_quantile,
        )  # fmt: skip

    def _allowed(self, iteration: int, trainer: L.Trainer) -> int:
        maximum = self._maximum(trainer)
        if is_probe(iteration, self.warmup, self.interval):
            return maximum
        return cap(self._state(trainer), self.h_min, maximum)

    def _maximum(self, trainer: L.Trainer) -> int:
        ceiling = self._budget(trainer).ceiling
        return ceiling if self.h_max is None else min(self.h_max, ceiling)

    def _state(self, trainer: L.Trainer) -> DepthState:
        return DepthState(self._maximum(trainer)) if self.state is None else self.state

    def _budget(self, trainer: L.Trainer) -> RolloutBudget:
        return owner_of(HasRolloutBudget, trainer.datamodule).rollout_budget  # type: ignore[attr-defined,type-abstract]

    def _log(self, trainer: L.Trainer, module: L.LightningModule, statistics: TurnStatistics, probe: bool) -> None:
        state = self._state(trainer)
        figures = {
            "smoothed": state.smoothed,
            "cap": cap(state, self.h_min, self._maximum(trainer)),
            "effective": state.effective,
            "coverage": state.coverage,
            "successes": float(statistics.success_last_turns.sum()),
            "probe": float(probe),
            "seconds_saved": self.seconds_saved,
        }
        module.log_dict({f"depth/{name}": float(value) for name, value in figures.items()})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "state": None if self.state is None else dataclasses.asdict(self.state),
            "iteration": self.iteration,
            "history": list(self.history),
            "probe_seconds": self.probe_seconds,
            "seconds_saved": self.seconds_saved,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["state"]
        self.state = None if state is None else DepthState(**state)
        self.iteration = state_dict["iteration"]
        self.history = list(state_dict["history"])
        self.probe_seconds = state_dict["probe_seconds"]
        self.seconds_saved = state_dict["seconds_saved"]


def over_ranks(statistics: TurnStatistics, depth: int) -> TurnStatistics:
    """The sum over all ranks, each padded to ``depth`` turns."""
    fields = {f.name: getattr(statistics, f.name) for f in dataclasses.fields(statistics)}

    def total(values: torch.Tensor) -> torch.Tensor:
        return ranks.total(torch.nn.functional.pad(values, (0, depth - len(values))))

    return TurnStatistics(**{name: total(values) for name, values in fields.items()})
