"""On-policy rollouts as a Lightning datamodule: one epoch is one collection."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from sorl_lightning.collection_source import CollectionSource
from sorl_lightning.control import Learner, RolloutBudget, TurnAuthor, owner_of
from sorl_lightning.data_settings import Evaluation, check_fit, check_settings
from sorl_lightning.padding_free import is_padding_free, shared_from
from sorl_lightning.rollout.background import refuse_leftovers
from sorl_lightning.rollout.chat import ChatFormat
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.rollout.collector import Reward
from sorl_lightning.rollout.engine import RolloutEngine
from sorl_lightning.rollout.engines import LocalEngine
from sorl_lightning.rollout.environment import Environment
from sorl_lightning.rollout.packing import finite_rows, pack
from sorl_lightning.rollout.token_limits import check_token_budget
from sorl_lightning.streams import Aggregation, EvaluationStream, RolloutStream, Sealed, UpdatePlan
from sorl_lightning.types import RolloutBatch, Task

__all__ = ["Evaluation", "RolloutDataModule"]

logger = logging.getLogger(__name__)
Split = Literal["train", "validation", "test"]


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
        self._source = CollectionSource(self, self.turn_author)

    # Set-up and tear-down

    @override
    def setup(self, stage: str) -> None:
        """Refuse what cannot work before anything is sampled."""
        check_settings(self)
        splits = {"fit": ["train"], "validate": ["validation"], "test": ["test"]}.get(stage, [])
        if stage == "fit" and self._trainer().limit_val_batches:
            splits.append("validation")
        for split in splits:
            self.tasks(split)
        if stage == "fit":
            check_fit(self, self._trainer())

    @override
    def teardown(self, stage: str) -> None:
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Give back engines, environment and loop; the next collection starts them anew."""
        self._source.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The depth in force; tasks and seeds follow from the number of the collection.

        With streaming, also what has started and is not trained, of all ranks: they must all ask.
        """
        return {"max_turns": self.rollout_budget.max_turns, **self._source.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollout_budget.limit(state_dict["max_turns"])
        states = state_dict.get("background", ())
        if self.max_staleness:
            self._source.restore(states)
        elif states and self._trainer().state.fn == TrainerFn.FITTING:
            refuse_leftovers(states)

    # Loaders

    @override
    def train_dataloader(self) -> RolloutStream:
        learner = self._learner()
        check_token_budget(self.token_budget, self._source.context(learner))
        policy = learner.policy_model
        plan = UpdatePlan(
            mini_batches=self.mini_batches,
            passes=self.passes,
            micro_batches=self.micro_batches,
            token_budget=self.token_budget,
            aggregation=self.aggregation,
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            seed=self.seed,
            padded=not is_padding_free(policy),
            shortest=shared_from(policy, self._trainer().strategy.root_device),
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
        return self._source.tasks(split)

    def tasks_of_collection(self, index: int) -> list[Task]:
        """Tasks of training collection ``index`` on all ranks: a pure function of the seed and the index.

        Every task is played once before one is played twice, in a new order each time round.
        """
        return self._source.tasks_of_collection(index)

    def collect(self) -> Collection:
        """Pull the weights and roll out the next training collection on this rank."""
        trainer, learner, max_turns = self._trainer(), self._learner(), self.rollout_budget.max_turns
        index = trainer.current_epoch
        if self.max_staleness:
            left = None if trainer.max_epochs in (None, -1) else trainer.max_epochs - index
            self.collection = self._source.streamed(learner, index, max_turns, left)
        else:
            self.collection = self._source.whole(learner, index, max_turns)
        return self.collection

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
        return self._source.held_out(self._learner(), split)

    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule collects inside a Trainer's fit, validate or test")
        return self.trainer

    def _learner(self) -> Learner:
        return owner_of(Learner, self._trainer().lightning_module)  # type: ignore[type-abstract]
