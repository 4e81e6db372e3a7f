"""Where collections come from: tasks, played with the learner's weights as the settings say."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sorl_lightning import ranks
from sorl_lightning.control import Learner, TurnAuthor
from sorl_lightning.data_settings import Settings
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.arena import Arena
from sorl_lightning.rollout.background import Background
from sorl_lightning.rollout.chat import Chat
from sorl_lightning.rollout.collection import Collection, refuse_empty
from sorl_lightning.rollout.collector import Collector, Sampling
from sorl_lightning.rollout.engine import RolloutEngine, derive_seed
from sorl_lightning.rollout.guest_engines import GuestEngines
from sorl_lightning.rollout.guests import Guests
from sorl_lightning.rollout.outages import despite_outages
from sorl_lightning.rollout.resampling import resampled
from sorl_lightning.rollout.task_order import tasks_of_collection, tasks_of_round
from sorl_lightning.rollout.token_limits import check_prompts, context_in_force
from sorl_lightning.sharding import full_weights
from sorl_lightning.types import Task


class CollectionSource:
    """Plays collections, on all ranks together; each gets its share.

    Args:
        settings: those of RolloutDataModule.
        author: the knob that says who plays beside the policy.
    """

    def __init__(self, settings: Settings, author: TurnAuthor) -> None:
        self.settings = settings
        self._arena = Arena(settings.environment)
        self._guests = GuestEngines(self._arena, author)
        self._tasks: dict[str, Sequence[Task]] = {}
        self._background: Background | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split.

        Raises:
            ConfigurationError: there are none.
        """
        environment, validation = self.settings.environment, self.settings.validation
        if split not in self._tasks:
            self._tasks[split] = environment.tasks(split)
        tasks = self._tasks[split]
        if split != "train" and validation.max_tasks is not None:
            tasks = tasks[: validation.max_tasks]
        if not tasks:
            raise ConfigurationError(f"{type(environment).__name__} has no tasks in its {split!r} split")
        return tasks

    def tasks_of_collection(self, index: int) -> list[Task]:
        """Tasks of training collection ``index``, on all ranks."""
        return tasks_of_collection(self.tasks("train"), index, self.settings.tasks_per_collection, self.settings.seed)

    def whole(self, learner: Learner, index: int, max_turns: int) -> Collection:
        """Training collection ``index``, played to its end, with others in the place of groups without signal."""
        settings = self.settings
        guests = self._guests.invite(learner, stay=False)
        collector = self._collector(learner, settings.engine, settings.temperature, settings.group_size, guests)

        def check(lengths: Sequence[int]) -> None:
            check_prompts(lengths, settings.token_budget, settings.mini_batches, settings.micro_batches)

        def play_others(number: int, most: int) -> Collection:
            others = tasks_of_round(self.tasks("train"), index, number, settings.seed)[:most]
            seed = derive_seed(settings.seed, "resample", index, number)
            return self._play(learner, collector, others, max_turns, seed, index)

        tasks, seed = self.tasks_of_collection(index), derive_seed(settings.seed, "train", index)
        collection = self._play(learner, collector, tasks, max_turns, seed, index, check)
        return self._with_pause(resampled(collection, settings.resample, play_others))

    def streamed(self, learner: Learner, index: int, max_turns: int, collections: int | None) -> Collection:
        """Training collection ``index``: of the groups that finish next, while the others play on.

        Args:
            collections: still to be trained, this one included; None: no end is known.
        """
        settings, background = self.settings, self._streaming()

        def ready() -> Collector:
            guests = self._guests.invite(learner, stay=True)
            self._load_weights(learner, settings.engine)
            return self._collector(learner, background.gate, settings.temperature, settings.group_size, guests)

        return self._with_pause(background.collect(index, ready, max_turns, collections, learner.policy_version))

    def held_out(self, learner: Learner, split: str) -> Collection:
        """All tasks of ``split`` to full depth, with seeds that never change."""
        validation, settings = self.settings.validation, self.settings
        engine = validation.engine or settings.engine
        collector = self._collector(learner, engine, validation.temperature, validation.n)
        seed = derive_seed(settings.seed, split)
        return self._play(learner, collector, self.tasks(split), settings.max_turns, seed, 0)

    def context(self, learner: Learner) -> int:
        """Most tokens of a trajectory."""
        return context_in_force(learner.policy_model, self.settings.context_limit)

    def state(self) -> dict[str, Any]:
        """With streaming, what has started and is not trained, of all ranks, which must all ask; otherwise nothing."""
        return {} if self._background is None else {"background": self._background.state()}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Stream on from ``states``, at the next collection."""
        self._streaming().restore(states)

    def close(self) -> None:
        """Give back engines, environment and loop; the next collection starts them anew."""
        if self._background is not None:
            self._background.suspend()
        self._arena.close()

    def _play(
        self,
        learner: Learner,
        collector: Collector,
        tasks: Sequence[Task],
        max_turns: int,
        seed: int,
        index: int,
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> Collection:
        """Pull the weights and play this rank's share of ``tasks``: every world-size-th, siblings together."""
        own = range(ranks.index(), len(tasks), ranks.count())
        share = [tasks[position] for position in own]

        def attempt() -> Collection:
            self._load_weights(learner, collector.engine)
            playing = collector.collect(share, max_turns, seed, index, learner.policy_version, own, check)
            return self._arena.run(playing)

        collection = despite_outages(attempt)
        refuse_empty(collection, len(tasks))
        return collection

    def _with_pause(self, collection: Collection) -> Collection:
        return dataclasses.replace(collection, loop_pause=self._arena.loop.watchdog.take_longest())

    def _load_weights(self, learner: Learner, engine: RolloutEngine) -> None:
        """Give ``engine`` the policy's weights."""
        self._arena.attach(engine, learner.policy_model, learner.tokenizer)
        played = self._background if engine is self.settings.engine else None
        with contextlib.nullcontext() if played is None else played.new_weights(learner.policy_version):
            engine.load_weights(full_weights(learner.policy_model), learner.policy_version)

    def _streaming(self) -> Background:
        if self._background is None:
            settings, size = self.settings, self.settings.tasks_per_collection
            self._background = Background(
                self._arena.loop,
                settings.engine,
                size,
                settings.max_staleness,
                settings.seed,
                lambda position: self.tasks_of_collection(position // size)[position % size],
            )
        return self._background

    def _collector(
        self,
        learner: Learner,
        engine: RolloutEngine,
        temperature: float,
        group_size: int,
        guests: Guests | None = None,
    ) -> Collector:
        settings = self.settings
        return Collector(
            settings.environment,
            engine,
            Chat(learner.tokenizer, settings.chat),
            Sampling(max_tokens=settings.max_tokens, context_limit=self.context(learner), temperature=temperature),
            group_size,
            settings.retries,
            settings.reward,
            guests,
            settings.step_timeout,
        )
