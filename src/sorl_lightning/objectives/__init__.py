"""What a policy is trained for: hyper-parameters beside the pure functions of ``functional``."""

from sorl_lightning.objectives.distillation import Distillation
from sorl_lightning.objectives.imitation import Imitation
from sorl_lightning.objectives.mismatch import Mismatch
from sorl_lightning.objectives.objective import (
    HasCriticRewards,
    HasHeldOutFigures,
    HasOldPolicy,
    Metrics,
    Objective,
    TeacherObjective,
)
from sorl_lightning.objectives.policy_gradient import PolicyGradient

__all__ = [
    "Distillation",
    "HasCriticRewards",
    "HasHeldOutFigures",
    "HasOldPolicy",
    "Imitation",
    "Metrics",
    "Mismatch",
    "Objective",
    "PolicyGradient",
    "TeacherObjective",
]
