"""Engines of an expert and of the teacher, for turns that the policy does not play."""

from __future__ import annotations

import dataclasses

from sorl_lightning.control import HasTeacher, Learner, TurnAuthor, owner_of
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.arena import Arena
from sorl_lightning.rollout.engine import RolloutEngine
from sorl_lightning.rollout.engines import ExpertEngine, LocalEngine
from sorl_lightning.rollout.guests import Guests
from sorl_lightning.sharding import full_weights
from sorl_lightning.teachers import FullTeacher
from sorl_lightning.types import Author


class GuestEngines:
    """Engines of the guests of a run, made when the knob first names them, and kept.

    Args:
        arena: where they play.
        author: the knob.
    """

    def __init__(self, arena: Arena, author: TurnAuthor) -> None:
        self.arena = arena
        self.author = author
        self._engines: dict[Author, RolloutEngine] = {}

    def invite(self, learner: Learner, stay: bool) -> Guests | None:
        """Those whom the knob names now, with their weights; their turns count as of the policy's version.

        Args:
            learner: owner of the teacher.
            stay: whether those who once played may have turns to come, as with streaming.

        Returns:
            Guests who keep to the knob as it is now; None: nobody is to play.

        Raises:
            ConfigurationError: the teacher is to play, and is not in this process.
        """
        wanted: dict[Author, bool] = {
            "expert": self.author.expert_prefix is not None,
            "teacher": self.author.teacher_probability > 0,
        }
        engines = {
            author: self._ready(author, learner)
            for author, plays in wanted.items()
            if plays or (stay and author in self._engines)
        }
        return Guests(author=dataclasses.replace(self.author), engines=engines) if engines else None

    def _ready(self, author: Author, learner: Learner) -> RolloutEngine:
        if author == "expert":
            engine: RolloutEngine = self._engines.setdefault("expert", ExpertEngine())
            self.arena.attach(engine, learner.policy_model, learner.tokenizer)
            engine.load_weights((), learner.policy_version)
            return engine
        teacher = owner_of(HasTeacher, learner).teacher  # type: ignore[type-abstract]
        if not isinstance(teacher, FullTeacher):
            raise ConfigurationError(f"only a teacher in this process can play turns, and model.teacher is {teacher}")
        engine = self._engines.setdefault("teacher", LocalEngine())
        self.arena.attach(engine, teacher.model, learner.tokenizer)
        engine.load_weights(full_weights(teacher.model), learner.policy_version)
        return engine
