"""The objective's own figures on held-out rollouts: what success does not show yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.objectives import HasHeldOutFigures, Objective
from sorl_lightning.rollout.packing import pack
from sorl_lightning.student_teacher import forward, parts, recorded
from sorl_lightning.tally import Tally
from sorl_lightning.teachers import Teacher
from sorl_lightning.types import Trajectory


@torch.no_grad()
def held_out_figures(
    policy: PolicyNetwork,
    objective: Objective,
    teacher: Teacher | None,
    trajectories: Sequence[Trajectory],
    temperature: float,
    device: torch.device,
) -> dict[str, float]:
    """Mean over the generated tokens of all ranks, which must all ask; nothing for an objective without such figures.

    Args:
        trajectories: this rank's; it may have none.
        temperature: of training rollouts, as in training.
        device: where the networks compute.
    """
    if not isinstance(objective, HasHeldOutFigures):
        return {}
    rows = recorded(objective, teacher, pack(trajectories), temperature)
    tally = Tally()
    for _, part in parts(rows, policy, device):
        logprobs, _, _, compared = forward(policy, objective, teacher, part, temperature)
        for name, values in objective.held_out(compared, logprobs).items():
            tally.add_mean(name, values, compared.generated)
    return {name: float(value) for name, value in tally.flush().items()}
