"""Which parts of a run go together; each refusal is a sentence that names both sides."""

from __future__ import annotations

from sorl_lightning.critic import Critic
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import ModelSource
from sorl_lightning.objectives import HasCriticRewards, HasOldPolicy, Objective, PolicyGradient
from sorl_lightning.rollout.packing import split_trajectories
from sorl_lightning.types import RolloutBatch


def check_reference(objective: Objective, reference: ModelSource | None) -> None:
    """Refuse a reference that nobody compares with.

    Raises:
        ConfigurationError: as said.
    """
    if reference is not None and not objective.needs_reference:
        raise ConfigurationError(
            f"model.reference is set, and objective {type(objective).__name__} compares with none "
            "(objective.kl_coefficient is 0): leave it out"
        )


def check_critic(objective: Objective, critic: Critic | None) -> None:
    """Refuse an objective without the critic that it needs, and the other way round.

    Raises:
        ConfigurationError: as said.
    """
    needs_critic = isinstance(objective, HasCriticRewards) and objective.needs_critic
    if needs_critic and critic is None:
        raise ConfigurationError("objective.advantage='gae' needs a critic, and model.critic is null")
    if critic is not None and not needs_critic:
        raise ConfigurationError(
            "model.critic is set, but no advantage comes from it: set objective.advantage='gae', or model.critic to "
            "null"
        )


def check_old_policy(objective: Objective, max_staleness: int) -> None:
    """Refuse ratios to weights that have not sampled the tokens, with nothing that corrects for it.

    Raises:
        ConfigurationError: as said.
    """
    for part in (objective, getattr(objective, "reward", None)):
        if max_staleness and isinstance(part, PolicyGradient) and part.old == "recompute" and part.mismatch is None:
            raise ConfigurationError(
                "objective.old='recompute' takes ratios to the weights at the start of a collection, and with "
                f"data.max_staleness={max_staleness} older ones have sampled it: set objective.mismatch, "
                "which corrects for them, or objective.old='engine'"
            )


def check_rows(objective: Objective, rows: RolloutBatch, micro_batches: int) -> None:
    """Refuse to pool over trajectories whose rows may be parted.

    Raises:
        ConfigurationError: as said.
    """
    pools = isinstance(objective, HasOldPolicy) and objective.pools_trajectories
    if pools and micro_batches > 1 and split_trajectories(rows):
        raise ConfigurationError(
            "objective.ratio or mismatch.level 'sequence' pools over whole trajectories, but the chat template "
            f"rewrites history and splits them into rows, which data.micro_batches={micro_batches} may part: set "
            "data.micro_batches to 1"
        )
