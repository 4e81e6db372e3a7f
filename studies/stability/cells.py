"""The cells of the study: what differs between its runs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

GRPO, TURN_GRPO, GSPO = "sorl:objective/grpo", "sorl:objective/turn_grpo", "sorl:objective/gspo"
PPO, TURN_PPO = "sorl:objective/ppo", "sorl:objective/turn_ppo"
SMALLER = ("--model.optimizer.lr", "1.0e-3")
SWITCH = "sorl:clipping_triggered_normalization"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of run.

    Attributes:
        name: as the page shows it; also the name of its files.
        objective: config of the algorithm.
        normalized: with the switch clipping_triggered_normalization.
        options: further arguments.
    """

    name: str
    objective: str
    normalized: bool = False
    options: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Arguments of ``sorl fit`` that make the cell."""
        switch = ["--config", SWITCH] if self.normalized else []
        return ["--config", self.objective, *switch, *self.options]


CELLS = (
    Cell(name="GRPO", objective=GRPO),
    Cell(name="Turn-GRPO", objective=TURN_GRPO),
    Cell(name="S-GRPO", objective=GRPO, normalized=True),
    Cell(name="SO-GRPO", objective=TURN_GRPO, normalized=True),
    Cell(name="PPO", objective=PPO),
    Cell(name="Turn-PPO", objective=TURN_PPO),
    Cell(name="S-PPO", objective=PPO, normalized=True),
    Cell(name="SO-PPO", objective=TURN_PPO, normalized=True),
    Cell(name="GRPO-smaller-step", objective=GRPO, options=SMALLER),
    Cell(name="GSPO", objective=GSPO),
)
