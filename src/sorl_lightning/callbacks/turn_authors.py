"""Turns that somebody else plays: an expert first, a teacher now and then."""

from __future__ import annotations

import functools

import lightning as L
from typing_extensions import override

from sorl_lightning.callbacks.depth_schedules import check_least
from sorl_lightning.callbacks.knob_setter import KnobSetter, progress
from sorl_lightning.control import HasTeacher, HasTurnAuthor, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.schedules import cosine_ramp, expert_prefix
from sorl_lightning.teachers import FullTeacher


class TCODB2F(KnobSetter):
    """Curriculum from back to front: the expert plays max(0, L - 1 - floor(k / every)) turns, then the student.

    L is the number of turns of the expert's own way through the task, k of collections made. Only the student's turns
    are trained on. The environment must know an expert action.

    Args:
        every: collections after which the student takes over one turn earlier.

    Source: arXiv:2604.24005 (TCOD-B2F).
    """

    knob = "turn_author.expert_prefix"

    def __init__(self, every: int = 2) -> None:
        check_least(self, every=every)
        self.every = every

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        author = owner_of(HasTurnAuthor, trainer.datamodule).turn_author  # type: ignore[attr-defined,type-abstract]
        author.expert_prefix = functools.partial(expert_prefix, trainer.current_epoch, every=self.every)


class GuidedOPD(KnobSetter):
    """The teacher plays each turn with a probability that falls from 1 to 0 along half a cosine.

    Its turns train by the forward KL, the student's by the divergence of the objective.

    Args:
        end: progress in (0, 1] from which the student plays alone.

    Source: arXiv:2606.15912 (Guided-OPD).
    """

    knob = "turn_author.teacher_probability"
    needs_end = True

    def __init__(self, end: float = 0.8) -> None:
        if not 0 < end <= 1:
            raise ConfigurationError(f"GuidedOPD.end must be in (0, 1], got {end}")
        self.end = end

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        teacher = owner_of(HasTeacher, pl_module).teacher  # type: ignore[type-abstract]
        if stage == "fit" and not isinstance(teacher, FullTeacher):
            raise ConfigurationError(
                f"GuidedOPD lets model.teacher play, which must be one in this process, got {teacher}"
            )

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        author = owner_of(HasTurnAuthor, trainer.datamodule).turn_author  # type: ignore[attr-defined,type-abstract]
        author.teacher_probability = 1 - cosine_ramp(progress(trainer), 0.0, self.end)
        pl_module.log("turn_author/teacher_probability", author.teacher_probability)
