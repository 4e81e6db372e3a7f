"""The learner: a policy, its frozen reference, one training step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from sorl_lightning import ranks
from sorl_lightning.adapters import has_adapters
from sorl_lightning.control import KLSchedule, TurnWeighting
from sorl_lightning.critic import Critic, ValueHead, ValueNetwork, explained_variance
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.weights import blend
from sorl_lightning.models import ModelSource, PolicyNetwork, frozen, source_of
from sorl_lightning.objectives import HasCriticRewards, HasOldPolicy, Objective
from sorl_lightning.rollout.collector import Collection
from sorl_lightning.rollout.metrics import constant_groups, summarize
from sorl_lightning.rollout.packing import lengths, select, split_trajectories
from sorl_lightning.sharding import ShardingPlan, gradient_norm, is_sharded
from sorl_lightning.step_guard import StepGuard
from sorl_lightning.student_teacher import ROWS_AT_ONCE, check_teacher, forward, recorded, token_signals
from sorl_lightning.tally import Tally
from sorl_lightning.teachers import Teacher
from sorl_lightning.turn_records import TurnRecords
from sorl_lightning.types import Ending, LossTerms, RolloutBatch, Trajectory, TurnProfile, TurnStatistics

WITH_MAXIMUM = ("ratio", "mismatch_kl")  # figures of tokens whose largest value is logged beside the mean


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW at the papers' learning rate for models of billions of parameters, 1e-6."""
    return torch.optim.AdamW(parameters, lr=1e-6)


class AgentModule(L.LightningModule):
    """Trains a causal language model on rollouts.

    Args:
        policy: where the policy comes from: a source such as Pretrained, or a folder or Hub id.
        objective: the loss.
        optimizer: called with the parameters; for a small model take a larger learning rate than the default's 1e-6.
        lr_scheduler: called with the optimizer, stepped once an optimiser step; None keeps the rate.
        reference: where the frozen reference comes from, if the objective needs one; None is the initial policy.
        teacher: whom the student learns from, if the objective is a distillation.
        critic: learns values beside the policy, for the advantage "gae".
        temperature: temperature of the training rollouts; log-probabilities are taken at it.
        max_skipped_steps: most optimiser steps in a row that may be skipped, for a loss or gradient that is not finite
            or for want of a token to train, before the run stops.
    """

    def __init__(
        self,
        policy: ModelSource | str,
        objective: Objective,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable | None = None,
        reference: ModelSource | None = None,
        teacher: Teacher | None = None,
        critic: Critic | None = None,
        temperature: float = 1.0,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__()
        self.source = source_of(policy)
        self.objective = objective
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.reference_source = reference
        self.teacher = teacher
        self.critic = critic
        self.temperature = temperature
        self.max_skipped_steps = max_skipped_steps
        self.steps = StepGuard()
        self.kl_schedule = KLSchedule()
        self.turn_weighting = TurnWeighting()
        self.policy_version = 0
        self.policy: PolicyNetwork | None = None
        self.value_network: ValueHead | ValueNetwork | None = None
        self.loss_terms: LossTerms | None = None
        self.token_figures: Mapping[str, Tensor] = {}
        self._explained_variance: float | None = None
        self._tally = Tally()
        self._turns: TurnRecords | None = None
        # Not registered as submodules: frozen models are neither trained, nor saved, nor set to training mode.
        self._frozen: dict[str, PolicyNetwork] = {}

    # Networks

    @override
    def configure_model(self) -> None:
        if self.policy is not None:
            return
        try:
            model, self.tokenizer = self.source.load()
        except ConfigurationError as error:
            raise ConfigurationError(f"model.policy: {error}") from error
        if self.objective.needs_reference:
            self._frozen["reference"] = frozen(model if self.reference_source is None else self._load_reference())
        if self.teacher is not None:
            self.teacher.attach(str(self.source), self.tokenizer, model.get_output_embeddings().weight.shape[0])
        self.policy = PolicyNetwork(model)
        # Weights beside adapters never change, and are not in checkpoints.
        self.strict_loading = not has_adapters(model)
        if self.critic is not None:
            own = self.critic.backbone == "own"
            source = self.critic.source or self.source
            self.value_network = ValueNetwork(source.load()[0]) if own else ValueHead(model)
        if self.device_mesh is not None:
            plan: ShardingPlan = getattr(self.trainer.strategy, "sharding", ShardingPlan())
            critics = [] if self.value_network is None else [self.value_network]
            for network in (self.policy, *critics, *self._frozen.values()):
                plan.apply(network, self.device_mesh["data_parallel"])

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            check_teacher(self.objective, self.teacher)
            if self.reference_source is not None and not self.objective.needs_reference:
                raise ConfigurationError(
                    f"model.reference is set, and objective {type(self.objective).__name__} compares with none "
                    "(objective.kl_coefficient is 0): leave it out"
                )

    def _load_reference(self) -> PreTrainedModel:
        assert self.reference_source is not None
        model, tokenizer = self.reference_source.load()
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigurationError(
                f"reference {self.reference_source} and policy {self.source} have different vocabularies"
            )
        return model

    @property
    def policy_model(self) -> PreTrainedModel:
        """The Hugging Face model inside the policy."""
        if self.policy is None:
            raise RuntimeError("the policy is loaded by configure_model, which the Trainer calls")
        return self.policy.model

    @override
    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        parameters: Any = (p for p in self.policy.parameters() if p.requires_grad)
        if self.critic is not None and self.value_network is not None:
            group: dict[str, Any] = {"params": [p for p in self.value_network.parameters() if p.requires_grad]}
            if self.critic.lr is not None:
                group["lr"] = self.critic.lr
            parameters = [{"params": list(parameters)}, group]
        try:
            optimizer = self.optimizer(parameters)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"model.optimizer: {error}") from error
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # Rollouts

    @torch.no_grad()
    def annotate(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Advantages, and the log-probabilities and values that the objective needs beside those of the engine."""
        self._check_rows(rows)
        if "reference" in self._frozen:
            reference = self._frozen["reference"]
            if not is_sharded(reference):
                reference.to(self.device)
            rows = rows.replace(reference_logprobs=self._score(rows, lambda part: self._logprobs(reference, part)))
        if isinstance(self.objective, HasOldPolicy) and self.objective.needs_old_logprobs:
            policy = self._policy()
            rows = rows.replace(old_logprobs=self._score(rows, lambda part: self._logprobs(policy, part)))
        rows = self._rewarded(rows, trajectories)
        rows = recorded(self.objective, self.teacher, rows, self.temperature)
        if self.turn_weighting.factor is not None:
            if is_sharded(self._policy()):
                raise ConfigurationError(
                    "a weighting of turns reads the policy's output layer, which must not be sharded"
                )
            signals = token_signals(self._policy(), self.objective, self.teacher, rows, self.temperature)
            rows = rows.replace(factors=self.turn_weighting.factor(signals))
        return rows

    def _rewarded(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Advantages from rewards or the critic; 0 at tokens that the teacher played."""
        if self.critic is not None:
            rows = self._estimate(self.critic, rows, trajectories)
        else:
            # A rank without trajectories asks too: some kinds compare those of all ranks.
            advantages = self.objective.advantages(trajectories)
            rows = rows.replace(advantages=spread(advantages if trajectories else torch.zeros(1), rows))
        if rows.by_teacher is None:
            return rows
        return rows.replace(advantages=rows.advantages.masked_fill(rows.by_teacher, 0.0))

    def _estimate(self, critic: Critic, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        assert isinstance(self.objective, HasCriticRewards)
        truncated = torch.tensor([trajectory.ending is not Ending.DONE for trajectory in trajectories] or [False])
        after = self._score(rows, self._values)
        rows = critic.estimate(rows, after, self.objective.token_rewards(rows), truncated)
        self._explained_variance = explained_variance(rows)
        return rows

    def _score(self, rows: RolloutBatch, score: Callable[[RolloutBatch], Tensor]) -> Tensor:
        """A number for each token up to its row's last generated one, a few rows at a time, on the CPU."""
        parts = list(torch.argsort(lengths(rows)).split(ROWS_AT_ONCE))
        # Sharded networks run as often on every rank: with padding where there are no more rows.
        parts += [parts[0][:0]] * (max(ranks.gather(len(parts))) - len(parts))
        scores: Tensor | None = None
        for index in parts:
            part = score(select(rows, index).to(self.device))
            part = part.to("cpu", torch.promote_types(part.dtype, torch.float32))
            scores = part.new_zeros(rows.turn.shape) if scores is None else scores
            if len(index):
                scores[index, : part.shape[1]] = part
        assert scores is not None
        return scores

    def _policy(self) -> PolicyNetwork:
        assert self.policy is not None
        return self.policy

    def _logprobs(self, network: PolicyNetwork, part: RolloutBatch) -> Tensor:
        return network(part.input_ids, part.position_ids, part.generated, self.temperature)[0]

    def _values(self, part: RolloutBatch) -> Tensor:
        """The critic's value after each token."""
        if isinstance(self.value_network, ValueNetwork):
            values: Tensor = self.value_network(part.input_ids, part.position_ids)
            return values
        inputs = (part.input_ids, part.position_ids, part.generated, self.temperature)
        head: Tensor = self._policy()(*inputs, value_head=self.value_network)[2]
        return head

    def _forward(self, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor | None, RolloutBatch]:
        """Log-probability and entropy of each token, the critic's value after it, and the batch with its comparison."""
        head = self.value_network if isinstance(self.value_network, ValueHead) else None
        logprobs, entropy, values, batch = forward(
            self._policy(), self.objective, self.teacher, batch, self.temperature, head
        )
        return logprobs, entropy, self._values(batch) if self.critic is not None and head is None else values, batch

    def _check_rows(self, rows: RolloutBatch) -> None:
        pools = isinstance(self.objective, HasOldPolicy) and self.objective.pools_trajectories
        if pools and self.trainer.accumulate_grad_batches > 1 and split_trajectories(rows):
            raise ConfigurationError(
                "objective.ratio or mismatch.level 'sequence' pools over whole trajectories, but the chat template "
                "rewrites history and splits them into rows, which data.micro_batches="
                f"{self.trainer.accumulate_grad_batches} may part: set data.micro_batches to 1"
            )

    # Training

    @override
    def on_fit_start(self) -> None:
        if self.max_skipped_steps < 0:
            raise ConfigurationError(f"model.max_skipped_steps must be 0 or more, got {self.max_skipped_steps}")
        self.objective.check(self._data().group_size)
        needs_critic = isinstance(self.objective, HasCriticRewards) and self.objective.needs_critic
        if needs_critic and self.critic is None:
            raise ConfigurationError("objective.advantage='gae' needs a critic, and model.critic is null")
        if self.critic is not None and not needs_critic:
            raise ConfigurationError(
                "model.critic is set, but no advantage comes from it: set objective.advantage='gae', or model.critic "
                "to null"
            )

    @override
    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self._training_start, self._trained_tokens = time.perf_counter(), 0.0
            self._log_collection(self._data().collection)
        logprobs, entropy, values, batch = self._forward(batch)
        weights = blend(batch.trajectory_weights, batch.turn_weights, self.kl_schedule.turn_blend)
        terms, metrics = self.objective.terms(batch, logprobs, entropy, weights)
        if self.critic is not None and values is not None:
            terms = dataclasses.replace(terms, value=self.critic.loss(batch, values.roll(1, dims=1), weights))
        self.token_figures = {"entropy": entropy.detach(), **metrics}
        self._account(batch, terms)
        self._record_turns(batch, batch_idx, entropy, weights)
        self.loss_terms = self._of_the_policy(terms)
        loss = terms.value if self._warming() and terms.value is not None else terms.total
        # Lightning divides by the number of micro-batches and strategies by that of ranks; the weights have done so.
        return loss * self.trainer.accumulate_grad_batches * ranks.count()

    def _of_the_policy(self, terms: LossTerms) -> LossTerms | None:
        """The terms that reach the policy's parameters; None while the critic warms up alone."""
        if self._warming():
            return None
        own = isinstance(self.value_network, ValueNetwork)
        return dataclasses.replace(terms, value=None) if own else terms

    def _warming(self) -> bool:
        return self.critic is not None and self.trainer.current_epoch < self.critic.warmup

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._warming() and self.policy is not None:
            for parameter in self.policy.parameters():  # a gradient of 0 would still let weight decay move them
                parameter.grad = None

    def _account(self, batch: RolloutBatch, terms: LossTerms) -> None:
        mask = batch.generated
        self.steps.add(terms.total, mask)
        self._tally.add("tokens", mask.sum())
        self._tally.add("train/loss", terms.total)
        self._tally.add("train/policy_loss", terms.policy)
        if terms.value is not None:
            self._tally.add("train/value_loss", terms.value)
        staleness = (self.policy_version - batch.policy_version).float()
        self._tally.add_mean("train/staleness", staleness, mask)
        self._tally.add_mean("train/advantage", batch.advantages, mask)
        self._tally.add_mean("train/advantage_variance", batch.advantages**2, mask)
        for name, values in self.token_figures.items():
            self._tally.add_mean(f"train/{name}", values, mask)
            if name in WITH_MAXIMUM:
                self._tally.add_maximum(f"train/{name}_max", values, mask)
        if terms.clipped is not None:
            turns, touched = touched_turns(batch, terms.clipped)
            self._tally.add_mean("train/clip_fraction_turns", touched.float(), turns)

    def _record_turns(self, batch: RolloutBatch, batch_idx: int, entropy: Tensor, weights: Tensor) -> None:
        """Add a micro-batch of the collection's first pass to what is known turn by turn."""
        if batch_idx == 0:
            self._turns = TurnRecords(self._data().collection.sound)
        if self._turns is not None and batch_idx < self._data().mini_batches * self._data().micro_batches:
            self._turns.add(batch, entropy, weights)

    @property
    def turn_statistics(self) -> TurnStatistics | None:
        """Counts and divergences by turn of the collection in training; complete when its epoch ends."""
        return None if self._turns is None else self._turns.statistics

    @property
    def turn_profile(self) -> TurnProfile | None:
        """Sums by turn for reports, likewise."""
        return None if self._turns is None else self._turns.profile

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        norm = self._gradient_norm()
        self._tally.add_mean("train/grad_norm", norm)
        if not self.steps.sound(norm):
            optimizer.zero_grad(set_to_none=True)  # without gradients an optimiser changes nothing, by decay either
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self._tally.add_mean("train/grad_norm_clipped", self._gradient_norm())

    def _gradient_norm(self) -> Tensor:
        return gradient_norm(p.grad for p in self.parameters() if p.grad is not None)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.steps.close(self.max_skipped_steps):
            self.policy_version += 1

    @override
    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        self.loss_terms, self.token_figures = None, {}
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return
        figures = self._tally.flush()
        self._trained_tokens += float(figures.pop("tokens"))
        figures["train/advantage_variance"] -= figures["train/advantage"] ** 2
        figures["train/skipped_steps"] = torch.tensor(float(self.steps.skipped))
        figures["kl_schedule/turn_blend"] = torch.tensor(self.kl_schedule.turn_blend)
        shown = "train/clip_fraction"
        self.log_dict({name: value for name, value in figures.items() if name != shown})
        if shown in figures:
            self.log(shown, figures[shown], prog_bar=True)
        seconds = time.perf_counter() - self._training_start
        self.log("throughput/trained_tokens_per_second", self._trained_tokens / seconds)
        self.log_dict({"collection": float(self.trainer.current_epoch), "policy_version": float(self.policy_version)})

    def _log_collection(self, collection: Collection | None) -> None:
        """Rollout figures, against the version of the weights that were rolled out."""
        if collection is None:
            return
        shares = ranks.gather((summarize(collection), constant_groups(collection.played)))
        summary = reduce(add, (summary for summary, _ in shares))
        groups = max(sum(share.terms for _, share in shares), 1)
        metrics = {f"rollout/{name}": value for name, value in summary.means.items()}
        metrics |= {
            "rollout/constant_groups": sum(share.total for _, share in shares) / groups,
            "rollout/discarded_groups": float(summary.discarded),
            "rollout/failed_groups": float(summary.failures),
            "rollout/dropped_trajectories": float(summary.dropped),
            "rollout/seconds": summary.seconds,
            "rollout/turn_limit": float(summary.turn_limit),
            "throughput/generated_tokens_per_second": summary.tokens / summary.seconds,
            "collection": float(collection.index),
        }
        if self._explained_variance is not None:
            metrics["critic/explained_variance"] = self._explained_variance
        for logger in self.loggers:
            logger.log_metrics(metrics, step=collection.policy_version)
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name in ("rollout/success", "rollout/turns"), logger=False)

    # Evaluation

    @override
    def validation_step(self, batch: Collection, batch_idx: int) -> None:
        self._log_evaluation(batch, "val")

    @override
    def test_step(self, batch: Collection, batch_idx: int) -> None:
        self._log_evaluation(batch, "test")

    def _log_evaluation(self, collection: Collection, prefix: str) -> None:
        summary = reduce(add, ranks.gather(summarize(collection)))
        metrics = {
            **summary.means,
            "failed_groups": float(summary.failures),
            "seconds": summary.seconds,
            "episodes": float(summary.trajectories),
        }
        for name, value in metrics.items():
            # Every rank knows the figures of all; one batch holds the whole split.
            self.log(
                f"{prefix}/{name}", value, prog_bar=name == "success", batch_size=1, add_dataloader_idx=False,
                rank_zero_only=False,
            )  # fmt: skip

    # Checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["policy_version"] = self.policy_version
        checkpoint["steps"] = self.steps.state_dict()
        if not self.strict_loading:
            everything = self.named_parameters(remove_duplicate=False)  # tied ones have several names
            unchanging = {name for name, parameter in everything if not parameter.requires_grad}
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: weights[name] for name in weights if name not in unchanging}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and not checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]:
            raise ConfigurationError(
                "ckpt_path was saved in the middle of a collection, whose other trajectories are lost; resume from one "
                "that was saved at the end of a collection (checkpoint.save_on_train_epoch_end, the default)"
            )
        self.policy_version = checkpoint["policy_version"]
        self.steps.load_state_dict(checkpoint["steps"])

    def _data(self) -> Any:
        return self.trainer.datamodule  # type: ignore[attr-defined]


def spread(advantages: Tensor, rows: RolloutBatch) -> Tensor:
    """Give each generated token the advantage of its trajectory ([N]) or of its turn of it ([N, K])."""
    place = (rows.trajectory,) if advantages.ndim == 1 else (rows.trajectory, rows.turn.clamp(min=0))
    return torch.where(rows.generated, advantages[place], 0.0)


def touched_turns(batch: RolloutBatch, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """The last token of each turn, and whether a token of its turn was clipped, both bool [B, T]."""
    following = torch.nn.functional.pad(batch.turn[:, 1:], (0, 1), value=-2)
    last = batch.generated & (following != batch.turn)
    turns = last.flip(1).cumsum(1).flip(1) * batch.generated  # numbers the turns of a row from its end
    counts = turns.new_zeros(turns.shape[0], int(turns.max()) + 1)
    counts.scatter_add_(1, turns, clipped.long())
    return last, counts.gather(1, turns) > 0
