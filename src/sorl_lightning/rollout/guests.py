"""Who plays turns beside the policy: an expert, or the teacher."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from sorl_lightning.control import TurnAuthor
from sorl_lightning.rollout.engine import RolloutEngine, derive_seed
from sorl_lightning.types import Author


@dataclass(frozen=True, slots=True, kw_only=True)
class Guests:
    """The knob, and the engines of the authors that it may name."""

    author: TurnAuthor
    engines: Mapping[Author, RolloutEngine]

    def author_of(self, turn: int, expert_turns: int, seed: int) -> Author:
        """Who plays turn ``turn`` of an episode.

        Args:
            expert_turns: turns that the expert opens the episode with.
            seed: of the episode.
        """
        if turn < expert_turns:
            return "expert"
        chance = random.Random(derive_seed(seed, "author", turn)).random()
        return "teacher" if chance < self.author.teacher_probability else "policy"
