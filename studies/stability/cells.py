"""The cells of the study: what differs between its runs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from studies.stability.regimes import Regime, Setting

GRPO, TURN_GRPO, GSPO = "sorl:objective/grpo", "sorl:objective/turn_grpo", "sorl:objective/gspo"
PPO, TURN_PPO = "sorl:objective/ppo", "sorl:objective/turn_ppo"
SWITCH, WATCH = "sorl:clipping_triggered_normalization", "sorl:clipping_monitor"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of run.

    Attributes:
        name: as the page shows it; also the name of its files.
        objective: config of the algorithm.
        normalized: with the switch clipping_triggered_normalization.
        step: factor of the regime's learning rate.
        own_clip_range: keeps the clip range of its config, whose ratio has another scale.
        one_pass: each collection is passed over once and there are as many more of them: as many updates, less far
            from the policy that sampled.
    """

    name: str
    objective: str
    normalized: bool = False
    step: float = 1.0
    own_clip_range: bool = False
    one_pass: bool = False

    def arguments(self, setting: Setting) -> list[str]:
        """Arguments of ``sorl fit`` that make the cell."""
        learning_rate = f"{setting.learning_rate * self.step:g}"
        bounds = [] if self.own_clip_range else ["--model.objective.epsilon_low", "--model.objective.epsilon_high"]
        return [
            "--config", self.objective, "--config", SWITCH if self.normalized else WATCH,
            "--model.optimizer.lr", learning_rate,
            *(argument for bound in bounds for argument in (bound, f"{setting.clip_range:g}")),
            *(["--data.passes", "1"] if self.one_pass else []),
        ]  # fmt: skip

    def collections(self, regime: Regime, collections: int) -> int:
        """How many collections give as many updates as ``collections`` of the regime."""
        return collections * (regime.passes if self.one_pass else 1)

    def updates(self, regime: Regime) -> int:
        """Optimiser steps a collection."""
        return regime.data["mini_batches"] * (1 if self.one_pass else regime.passes)


CELLS = (
    Cell(name="GRPO", objective=GRPO),
    Cell(name="Turn-GRPO", objective=TURN_GRPO),
    Cell(name="S-GRPO", objective=GRPO, normalized=True),
    Cell(name="SO-GRPO", objective=TURN_GRPO, normalized=True),
    Cell(name="PPO", objective=PPO),
    Cell(name="Turn-PPO", objective=TURN_PPO),
    Cell(name="S-PPO", objective=PPO, normalized=True),
    Cell(name="SO-PPO", objective=TURN_PPO, normalized=True),
    Cell(name="GRPO-smaller-step", objective=GRPO, step=1 / 3),
    Cell(name="GSPO", objective=GSPO, own_clip_range=True),
    Cell(name="GRPO-one-pass", objective=GRPO, one_pass=True),
)
SCOUTED = tuple(cell for cell in CELLS if cell.name in ("GRPO", "SO-GRPO"))
