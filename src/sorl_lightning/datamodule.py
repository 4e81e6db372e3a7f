"""On-policy rollouts as a Lightning datamodule: one epoch is one collection."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from sorl_lightning import ranks
from sorl_lightning.control import HasTeacher, Learner, RolloutBudget, TurnAuthor, owner_of
from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.objectives import PolicyGradient
from sorl_lightning.padding_free import is_padding_free
from sorl_lightning.rollout.arena import Arena
from sorl_lightning.rollout.background import Background, refuse_leftovers
from sorl_lightning.rollout.chat import Chat, ChatFormat
from sorl_lightning.rollout.collector import Collection, Collector, Guests, Reward, Sampling
from sorl_lightning.rollout.engine import RolloutEngine, derive_seed
from sorl_lightning.rollout.engines import ExpertEngine, LocalEngine
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.rollout.gate import check_streaming
from sorl_lightning.rollout.metrics import constant_group_ids
from sorl_lightning.rollout.packing import finite_rows, pack
from sorl_lightning.rollout.resampling import replace_groups
from sorl_lightning.sharding import full_weights
from sorl_lightning.strategies import check_strategy
from sorl_lightning.streams import Aggregation, EvaluationStream, RolloutStream, Sealed, UpdatePlan, permutation
from sorl_lightning.teachers import FullTeacher
from sorl_lightning.types import Author, RolloutBatch, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")
Split = Literal["train", "validation", "test"]
OUTAGES = 2  # times that a collection may lose its engine before the run ends


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out tasks are rolled out: always to full depth, with the same seeds every time.

    Args:
        n: siblings a task; success is then Avg@n.
        temperature: sampling temperature.
        max_tasks: the first so many tasks of the split; None takes all.
        engine: plays instead of the policy: an expert, random actions.
    """

    n: int = 1
    temperature: float = 1.0
    max_tasks: int | None = None
    engine: RolloutEngine | None = None


class RolloutDataModule(L.LightningDataModule):
    """Collects trajectories with the current weights and streams them as micro-batches.

    Args:
        environment: the world; its tasks are played in an order that depends on ``seed`` alone.
        engine: generates the turns; None is a LocalEngine, in this process.
        tasks_per_collection: tasks a collection, over all ranks.
        group_size: siblings a task.
        max_turns: most turns of a trajectory.
        max_tokens: most tokens of a turn.
        context_limit: most tokens of a trajectory, prompt and observations included; None is what the model can take.
        temperature: sampling temperature of training rollouts, above 0; the trainer's log-probabilities use it too.
        mini_batches: optimiser steps a pass; each takes an equal share of the trajectories.
        passes: passes over a collection. ``mini_batches * passes`` optimiser steps a collection is the off-policyness.
        micro_batches: forward and backward passes an optimiser step; equals the trainer's accumulate_grad_batches.
        token_budget: most tokens of a micro-batch, at least the context limit: a row may be that long; padding counts
            where the model computes it. None sets no bound.
        aggregation: what counts equally in the loss: trajectories, tokens, or turns; "fixed" divides the sum over
            tokens by trajectories x max_turns x max_tokens, whatever was generated (Dr.GRPO).
        max_staleness: most collections between the weights that sampled a token and those that train on it. At 0 a
            collection is generated when the last one has been trained, by its weights. Above, up to so many collections
            are generated while one is trained, a collection is made of the groups that finish next, and the others are
            carried over.
        resample: rounds in which groups without signal (all siblings have one reward) are replaced by other tasks'
            groups (DAPO); those that are left after the last round stay.
        retries: fresh environments tried after one has failed, for each trajectory.
        step_timeout: longest wait for an environment whose ``reset`` and ``step`` are coroutines, seconds; after it the
            environment has failed. None waits for ever.
        reward: a callable on the finished trajectory that replaces the sum of its turn rewards.
        chat: how the model's chat template is used.
        validation: how the splits "validation" and "test" are rolled out.
        seed: of task order, sampling and mini-batches.
    """

    def __init__(
        self,
        environment: Environment,
        engine: RolloutEngine | None = None,
        tasks_per_collection: int = 16,
        group_size: int = 8,
        max_turns: int = 16,
        max_tokens: int = 32,
        context_limit: int | None = None,
        temperature: float = 1.0,
        mini_batches: int = 1,
        passes: int = 1,
        micro_batches: int = 1,
        token_budget: int | None = None,
        aggregation: Aggregation = "trajectory",
        max_staleness: int = 0,
        resample: int = 0,
        retries: int = 2,
        step_timeout: float | None = None,
        reward: Reward | None = None,
        chat: ChatFormat = ChatFormat(),
        validation: Evaluation = Evaluation(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.environment = environment
        self.engine = engine if engine is not None else LocalEngine()
        self.tasks_per_collection = tasks_per_collection
        self.group_size = group_size
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.context_limit = context_limit
        self.temperature = temperature
        self.mini_batches = mini_batches
        self.passes = passes
        self.micro_batches = micro_batches
        self.token_budget = token_budget
        self.aggregation = aggregation
        self.max_staleness = max_staleness
        self.resample = resample
        self.retries = retries
        self.step_timeout = step_timeout
        self.reward = reward
        self.chat = chat
        self.validation = validation
        self.seed = seed
        self.rollout_budget = RolloutBudget(ceiling=max_turns, max_turns=max_turns)
        self.turn_author = TurnAuthor()
        self.collection: Collection | None = None
        self._arena = Arena(environment)
        self._guest_engines: dict[Author, RolloutEngine] = {}
        self._tasks: dict[str, Sequence[Task]] = {}
        self._background: Background | None = None

    # Set-up and tear-down

    @override
    def setup(self, stage: str) -> None:
        self._check(stage)

    def _check(self, stage: str) -> None:
        """Refuse what cannot work before anything is sampled."""
        positive = ("tasks_per_collection", "group_size", "max_turns", "max_tokens", "context_limit", "token_budget")
        for name in (*positive, "mini_batches", "passes", "micro_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigurationError(f"data.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.temperature < math.inf:
            raise ConfigurationError(f"data.temperature must be above 0, to train, and finite, got {self.temperature}")
        for name in ("retries", "resample", "max_staleness"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"data.{name} must be 0 or more, got {getattr(self, name)}")
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise ConfigurationError(f"data.step_timeout must be above 0 seconds, got {self.step_timeout}")
        if self.aggregation not in get_args(Aggregation):
            raise ConfigurationError(
                f"data.aggregation must be one of {get_args(Aggregation)}, got {self.aggregation!r}"
            )
        if self.validation.n < 1:
            raise ConfigurationError(f"data.validation.n must be at least 1, got {self.validation.n}")
        if not 0 <= self.validation.temperature < math.inf:
            raise ConfigurationError(
                f"data.validation.temperature must be 0 or more and finite, got {self.validation.temperature}"
            )
        if self.validation.max_tasks is not None and self.validation.max_tasks < 1:
            raise ConfigurationError(f"data.validation.max_tasks must be at least 1, got {self.validation.max_tasks}")
        splits = {"fit": ["train"], "validate": ["validation"], "test": ["test"]}.get(stage, [])
        if stage == "fit" and self._trainer().limit_val_batches:
            splits.append("validation")
        for split in splits:
            self.tasks(split)
        if stage == "fit":
            self._check_fit()

    def _check_fit(self) -> None:
        trainer, world = self._trainer(), self._trainer().world_size
        check_strategy(trainer.strategy)
        module: Any = trainer.lightning_module  # whose policy is not loaded yet, so it is no Learner so far
        if module.temperature != self.temperature:
            raise ConfigurationError(
                f"model.temperature={module.temperature} must equal data.temperature={self.temperature}, or "
                "the importance ratios compare two different distributions"
            )
        if trainer.accumulate_grad_batches != self.micro_batches:
            raise ConfigurationError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must equal "
                f"data.micro_batches={self.micro_batches}"
            )
        if self.resample and self.group_size < 2:
            raise ConfigurationError(
                f"data.resample={self.resample} replaces groups whose siblings have one reward, which every group of "
                "data.group_size=1 is: set resample to 0 or group_size to 2 or more"
            )
        if self.tasks_per_collection % world:
            raise ConfigurationError(
                f"data.tasks_per_collection={self.tasks_per_collection} must be a multiple of the {world} ranks"
            )
        if self.tasks_per_collection // world * self.group_size < self.mini_batches:
            raise ConfigurationError(
                f"data.mini_batches={self.mini_batches} is more than the trajectories of a collection on a rank, "
                f"{self.tasks_per_collection // world * self.group_size}"
            )
        if self.max_staleness:
            self._check_streaming(module.objective)

    def _check_streaming(self, objective: Any) -> None:
        check_streaming(self.engine)
        if self.resample:
            raise ConfigurationError(
                f"data.resample={self.resample} replaces groups of a collection that has been rolled out whole, and "
                f"data.max_staleness={self.max_staleness} makes collections of what finishes next: set one of them to 0"
            )
        for part in (objective, getattr(objective, "reward", None)):
            if isinstance(part, PolicyGradient) and part.old == "recompute" and part.mismatch is None:
                raise ConfigurationError(
                    "objective.old='recompute' takes ratios to the weights at the start of a collection, and with "
                    f"data.max_staleness={self.max_staleness} older ones have sampled it: set objective.mismatch, "
                    "which corrects for them, or objective.old='engine'"
                )

    @override
    def teardown(self, stage: str) -> None:
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Give back engines, environment and loop; the next collection starts them anew."""
        if self._background is not None:
            self._background.suspend()
        self._arena.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The depth in force; tasks and seeds follow from the number of the collection.

        With streaming, also what has started and is not trained, of all ranks: they must all ask.
        """
        state: dict[str, Any] = {"max_turns": self.rollout_budget.max_turns}
        return state if self._background is None else {**state, "background": self._background.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollout_budget.limit(state_dict["max_turns"])
        states = state_dict.get("background", ())
        if self.max_staleness:
            self._streaming().restore(states)
        elif states and self._trainer().state.fn == TrainerFn.FITTING:
            refuse_leftovers(states)

    # Loaders

    @override
    def train_dataloader(self) -> RolloutStream:
        self._check_token_budget()
        plan = UpdatePlan(
            mini_batches=self.mini_batches,
            passes=self.passes,
            micro_batches=self.micro_batches,
            token_budget=self.token_budget,
            aggregation=self.aggregation,
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            seed=self.seed,
            padded=not is_padding_free(self._learner().policy_model),
        )
        return RolloutStream(self.collect_rows, plan)

    @override
    def val_dataloader(self) -> EvaluationStream:
        return EvaluationStream(lambda: self.evaluate("validation"))

    @override
    def test_dataloader(self) -> EvaluationStream:
        return EvaluationStream(lambda: self.evaluate("test"))

    @override
    def transfer_batch_to_device(self, batch: Sealed, device: torch.device, dataloader_idx: int) -> Any:
        return batch.content.to(device)

    # Rollouts

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split.

        Raises:
            ConfigurationError: there are none.
        """
        if split not in self._tasks:
            self._tasks[split] = self.environment.tasks(split)
        tasks = self._tasks[split]
        if split != "train" and self.validation.max_tasks is not None:
            tasks = tasks[: self.validation.max_tasks]
        if not tasks:
            raise ConfigurationError(f"{type(self.environment).__name__} has no tasks in its {split!r} split")
        return tasks

    def tasks_of_collection(self, index: int) -> list[Task]:
        """Tasks of training collection ``index`` on all ranks: a pure function of the seed and the index.

        Every task is played once before one is played twice, in a new order each time round.
        """
        tasks = self.tasks("train")
        positions = range(index * self.tasks_per_collection, (index + 1) * self.tasks_per_collection)
        rounds = {position // len(tasks) for position in positions}
        orders = {r: permutation(len(tasks), derive_seed(self.seed, "order", r)) for r in rounds}
        return [tasks[orders[p // len(tasks)][p % len(tasks)]] for p in positions]

    def tasks_of_round(self, index: int, number: int) -> list[Task]:
        """Tasks that may replace those of collection ``index`` in round ``number`` of resampling, on all ranks."""
        tasks = self.tasks("train")
        return [tasks[p] for p in permutation(len(tasks), derive_seed(self.seed, "resample", index, number))]

    def collect(self) -> Collection:
        """Pull the weights and roll out the next training collection on this rank."""
        index = self._trainer().current_epoch
        if self.max_staleness:
            self.collection = self._collect_from_background(index)
            return self.collection
        tasks = self.tasks_of_collection(index)
        seed = derive_seed(self.seed, "train", index)
        collector = self._collector(self.engine, self.temperature, self.group_size, self._guests())
        collection = self._run(collector, tasks, self.rollout_budget.max_turns, seed, index, self._check_prompts)
        for number in range(self.resample):
            dead = constant_group_ids(collection.trajectories)
            most = max(ranks.gather(len(dead))) * self._trainer().world_size
            if not most:
                break
            tasks = self.tasks_of_round(index, number)[:most]
            seed = derive_seed(self.seed, "resample", index, number)
            fresh = self._run(collector, tasks, self.rollout_budget.max_turns, seed, index)
            collection = replace_groups(collection, dead, fresh)
        self.collection = collection
        return collection

    def collect_rows(self) -> tuple[int, RolloutBatch]:
        """Collect, and turn the trajectories into rows with all that the objective needs."""
        collection = self.collect()
        sound = collection.sound
        rows, unsound = finite_rows(self._learner().annotate(pack(sound), sound))
        dropped = len(collection.trajectories) - len(sound) + unsound
        if dropped:
            logger.warning("dropped %d trajectories: a reward, log-probability or advantage is not finite", dropped)
        self.collection = dataclasses.replace(collection, dropped=dropped)
        return collection.index, rows

    def evaluate(self, split: Split) -> Collection:
        """Roll out the held-out tasks of ``split`` to full depth, with seeds that never change."""
        engine = self.validation.engine or self.engine
        collector = self._collector(engine, self.validation.temperature, self.validation.n)
        return self._run(collector, self.tasks(split), self.max_turns, derive_seed(self.seed, split), 0)

    def _run(
        self,
        collector: Collector,
        tasks: Sequence[Task],
        max_turns: int,
        seed: int,
        index: int,
        check_prompts: Callable[[Sequence[int]], None] | None = None,
    ) -> Collection:
        """Pull the weights and roll out this rank's share of ``tasks``: every world-size-th, siblings together."""
        learner, trainer = self._learner(), self._trainer()
        own = range(trainer.global_rank, len(tasks), trainer.world_size)
        share = [tasks[position] for position in own]

        def attempt() -> Collection:
            self._prepare(collector.engine, learner.policy_model, full_weights(learner.policy_model))
            playing = collector.collect(share, max_turns, seed, index, learner.policy_version, own, check_prompts)
            return self._arena.run(playing)

        collection = self._despite_outages(attempt)
        self._check_trajectories(collection, len(tasks))
        return collection

    def _check_trajectories(self, collection: Collection, groups: int) -> None:
        if not ranks.anywhere(bool(collection.trajectories)):
            failures = [failure for failures in ranks.gather(collection.failures[:1]) for failure in failures]
            raise RolloutError(f"all {groups} groups of collection {collection.index} failed; the first: {failures[0]}")

    def _collect_from_background(self, index: int) -> Collection:
        """Pull the weights, start what may start, and take the groups that finish next; the others play on."""
        learner, trainer, background = self._learner(), self._trainer(), self._streaming()
        ranks.together(lambda: background.begin(index))
        left = None if trainer.max_epochs in (None, -1) else trainer.max_epochs - index

        def attempt() -> None:
            guests = self._guests()
            if guests is not None:  # whoever starts now keeps to the knob as it is now
                guests = dataclasses.replace(guests, author=dataclasses.replace(self.turn_author))
            self._prepare(self.engine, learner.policy_model, full_weights(learner.policy_model))
            collector = self._collector(background.gate, self.temperature, self.group_size, guests)
            background.play(collector, self.rollout_budget.max_turns, left)

        self._despite_outages(attempt)
        collection = ranks.together(lambda: background.take(learner.policy_version))
        self._check_trajectories(collection, self.tasks_per_collection)
        return collection

    def _streaming(self) -> Background:
        if self._background is None:
            size = self.tasks_per_collection
            self._background = Background(
                self._arena.loop,
                self.engine,
                size,
                self.max_staleness,
                self.seed,
                lambda position: self.tasks_of_collection(position // size)[position % size],
            )
        return self._background

    def _despite_outages(self, attempt: Callable[[], T]) -> T:
        """Collect on all ranks, and again where an engine was lost: the same seeds give what was interrupted."""
        for _ in range(OUTAGES):
            try:
                return ranks.together(attempt)
            except EngineOutage as error:
                logger.warning("%s; the collection starts again, with its weights loaded anew", error)
        return ranks.together(attempt)

    def _context(self) -> int:
        """The context limit in force.

        Raises:
            ConfigurationError: the model has fewer positions.
        """
        config = self._learner().policy_model.config.get_text_config()
        positions: int | None = getattr(config, "max_position_embeddings", None)
        limit = self.context_limit if self.context_limit is not None else positions
        if limit is None:
            raise ConfigurationError("the model does not say how many positions it has: set data.context_limit")
        if positions is not None and limit > positions:
            raise ConfigurationError(
                f"data.context_limit={limit} is more than the model's {positions} positions (max_position_embeddings)"
            )
        return limit

    def _check_token_budget(self) -> None:
        """Refuse a budget that one row may exceed."""
        limit = self._context()
        if self.token_budget is not None and self.token_budget < limit:
            raise ConfigurationError(
                f"data.token_budget={self.token_budget} tokens a micro-batch is less than a row may have, "
                f"data.context_limit={limit}: raise the budget or lower the limit"
            )

    def _check_prompts(self, lengths: Sequence[int]) -> None:
        """Refuse a budget that the first prompts alone exceed, each with one generated token."""
        least, parts = sum(lengths) + len(lengths), self.mini_batches * self.micro_batches
        if self.token_budget is not None and least > self.token_budget * parts:
            raise ConfigurationError(
                f"data.token_budget={self.token_budget} tokens a micro-batch is too small: the {len(lengths)} first "
                f"prompts have {least - len(lengths)} tokens, for mini_batches={self.mini_batches} x "
                f"micro_batches={self.micro_batches} micro-batches; raise data.micro_batches or the budget"
            )

    def _guests(self) -> Guests | None:
        """The expert and the teacher, if they are to play; their turns count as of the policy's version.

        With streaming, who once played may have turns to come.
        """
        wanted: dict[Author, bool] = {
            "expert": self.turn_author.expert_prefix is not None,
            "teacher": self.turn_author.teacher_probability > 0,
        }
        stays = self._guest_engines if self.max_staleness else {}
        engines = {author: self._guest(author) for author, plays in wanted.items() if plays or author in stays}
        return Guests(author=self.turn_author, engines=engines) if engines else None

    def _guest(self, author: Author) -> RolloutEngine:
        if author == "expert":
            expert = self._guest_engines.setdefault("expert", ExpertEngine())
            self._prepare(expert, self._learner().policy_model, ())
            return expert
        teacher = owner_of(HasTeacher, self._trainer().lightning_module).teacher  # type: ignore[type-abstract]
        if not isinstance(teacher, FullTeacher):
            raise ConfigurationError(f"only a teacher in this process can play turns, and model.teacher is {teacher}")
        engine = self._guest_engines.setdefault("teacher", LocalEngine())
        self._prepare(engine, teacher.model, full_weights(teacher.model))
        return engine

    def _prepare(self, engine: RolloutEngine, model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Attach ``engine`` where it is new, and give it weights."""
        learner = self._learner()
        self._arena.attach(engine, model, learner.tokenizer)
        played = self._background if engine is self.engine else None
        with contextlib.nullcontext() if played is None else played.new_weights(learner.policy_version):
            engine.load_weights(weights, learner.policy_version)

    def _collector(
        self, engine: RolloutEngine, temperature: float, group_size: int, guests: Guests | None = None
    ) -> Collector:
        return Collector(
            self.environment,
            engine,
            Chat(self._learner().tokenizer, self.chat),
            Sampling(max_tokens=self.max_tokens, context_limit=self._context(), temperature=temperature),
            group_size,
            self.retries,
            self.reward,
            guests,
            self.step_timeout,
        )

    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule collects inside a Trainer's fit, validate or test")
        return self.trainer

    def _learner(self) -> Learner:
        return owner_of(Learner, self._trainer().lightning_module)  # type: ignore[type-abstract]
