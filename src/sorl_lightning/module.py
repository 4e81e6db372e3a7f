"""The learner: a policy, its frozen reference, one training step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
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
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.weights import blend
from sorl_lightning.models import ModelSource, PolicyNetwork, Pretrained, frozen
from sorl_lightning.objectives import Objective
from sorl_lightning.rollout.collector import Collection
from sorl_lightning.rollout.metrics import constant_groups, summarize
from sorl_lightning.rollout.packing import lengths, select
from sorl_lightning.sharding import ShardingPlan, gradient_norm, is_sharded
from sorl_lightning.step_guard import StepGuard
from sorl_lightning.student_teacher import ROWS_AT_ONCE, check_teacher, forward, recorded, token_signals
from sorl_lightning.tally import Tally
from sorl_lightning.teachers import Teacher
from sorl_lightning.turn_records import TurnRecords
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory, TurnProfile, TurnStatistics


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
        temperature: float = 1.0,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__()
        self.source: ModelSource = Pretrained(path=policy) if isinstance(policy, str) else policy
        self.objective = objective
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.reference_source = reference
        self.teacher = teacher
        self.temperature = temperature
        self.max_skipped_steps = max_skipped_steps
        self.steps = StepGuard()
        self.kl_schedule = KLSchedule()
        self.turn_weighting = TurnWeighting()
        self.policy_version = 0
        self.policy: PolicyNetwork | None = None
        self.loss_terms: LossTerms | None = None
        self._tally = Tally()
        self._turns: TurnRecords | None = None
        # Not registered as submodules: frozen models are neither trained, nor saved, nor set to training mode.
        self._frozen: dict[str, PolicyNetwork] = {}

    # Networks

    @override
    def configure_model(self) -> None:
        if self.policy is not None:
            return
        model, self.tokenizer = self.source.load()
        if self.objective.needs_reference:
            self._frozen["reference"] = frozen(model if self.reference_source is None else self._load_reference())
        if self.teacher is not None:
            self.teacher.attach(str(self.source), self.tokenizer, model.get_output_embeddings().weight.shape[0])
        self.policy = PolicyNetwork(model)
        # Weights beside adapters never change, and are not in checkpoints.
        self.strict_loading = not has_adapters(model)
        if self.device_mesh is not None:
            plan: ShardingPlan = getattr(self.trainer.strategy, "sharding", ShardingPlan())
            for network in (self.policy, *self._frozen.values()):
                plan.apply(network, self.device_mesh["data_parallel"])

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            check_teacher(self.objective, self.teacher)

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
        try:
            optimizer = self.optimizer(p for p in self.policy.parameters() if p.requires_grad)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"model.optimizer: {error}") from error
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # Rollouts

    @torch.no_grad()
    def annotate(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Advantages, and the reference's log-probabilities where the objective needs them."""
        advantages = self.objective.advantages(trajectories) if trajectories else torch.zeros(1)
        rewarded = rows.generated if rows.by_teacher is None else rows.generated & ~rows.by_teacher
        changes = {"advantages": torch.where(rewarded, advantages[rows.trajectory], 0.0)}
        if "reference" in self._frozen:
            changes["reference_logprobs"] = self._score(self._frozen["reference"], rows)
        rows = recorded(self.objective, self.teacher, rows.replace(**changes), self.temperature)
        if self.turn_weighting.factor is not None:
            if is_sharded(self._policy()):
                raise ConfigurationError(
                    "a weighting of turns reads the policy's output layer, which must not be sharded"
                )
            signals = token_signals(self._policy(), self.objective, self.teacher, rows, self.temperature)
            rows = rows.replace(factors=self.turn_weighting.factor(signals))
        return rows

    def _score(self, network: PolicyNetwork, rows: RolloutBatch) -> Tensor:
        """Log-probabilities of the generated tokens, a few rows at a time, on the CPU."""
        if not is_sharded(network):
            network = network.to(self.device)
        scores = torch.zeros(rows.turn.shape)
        parts = list(torch.argsort(lengths(rows)).split(ROWS_AT_ONCE))
        # Sharded networks run as often on every rank: with padding where there are no more rows.
        parts += [parts[0][:0]] * (max(ranks.gather(len(parts))) - len(parts))
        for index in parts:
            part = select(rows, index).to(self.device)
            logprobs, _ = network(part.input_ids, part.position_ids, part.generated, self.temperature)
            if len(index):
                scores[index, : logprobs.shape[1]] = logprobs.float().cpu()
        return scores

    def _policy(self) -> PolicyNetwork:
        assert self.policy is not None
        return self.policy

    # Training

    @override
    def on_fit_start(self) -> None:
        if self.max_skipped_steps < 0:
            raise ConfigurationError(f"model.max_skipped_steps must be 0 or more, got {self.max_skipped_steps}")
        self.objective.check(self._data().group_size)

    @override
    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self._training_start, self._trained_tokens = time.perf_counter(), 0.0
            self._log_collection(self._data().collection)
        logprobs, entropy, batch = forward(self._policy(), self.objective, self.teacher, batch, self.temperature)
        weights = blend(batch.trajectory_weights, batch.turn_weights, self.kl_schedule.turn_blend)
        self.loss_terms, metrics = self.objective.terms(batch, logprobs, entropy, weights)
        self._account(batch, entropy, metrics)
        self._record_turns(batch, batch_idx, entropy, weights)
        # Lightning divides by the number of micro-batches and strategies by that of ranks; the weights have done so.
        return self.loss_terms.total * self.trainer.accumulate_grad_batches * ranks.count()

    def _account(self, batch: RolloutBatch, entropy: Tensor, metrics: Any) -> None:
        assert self.loss_terms is not None
        mask = batch.generated
        self.steps.add(self.loss_terms.total, mask)
        self._tally.add("tokens", mask.sum())
        self._tally.add("train/loss", self.loss_terms.total)
        self._tally.add("train/policy_loss", self.loss_terms.policy)
        self._tally.add_mean("train/entropy", entropy, mask)
        staleness = (self.policy_version - batch.policy_version).float()
        self._tally.add_mean("train/staleness", staleness, mask)
        self._tally.add_mean("train/advantage", batch.advantages, mask)
        self._tally.add_mean("train/advantage_variance", batch.advantages**2, mask)
        for name, values in metrics.items():
            self._tally.add_mean(f"train/{name}", values, mask)
        if "ratio" in metrics:
            self._tally.add_maximum("train/ratio_max", metrics["ratio"], mask)
        if self.loss_terms.clipped is not None:
            turns, touched = touched_turns(batch, self.loss_terms.clipped)
            self._tally.add_mean("train/clip_fraction_turns", touched.float(), turns)

    def _record_turns(self, batch: RolloutBatch, batch_idx: int, entropy: Tensor, weights: Tensor) -> None:
        """Add a micro-batch of the collection's first pass to what is known turn by turn."""
        if batch_idx == 0:
            self._turns = TurnRecords(self._data().collection.trajectories)
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
        self.loss_terms = None
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
        shares = ranks.gather((summarize(collection), constant_groups(collection.trajectories)))
        summary = reduce(add, (summary for summary, _ in shares))
        groups = max(sum(share.terms for _, share in shares), 1)
        metrics = {f"rollout/{name}": value for name, value in summary.means.items()}
        metrics |= {
            "rollout/constant_groups": sum(share.total for _, share in shares) / groups,
            "rollout/failed_groups": float(summary.failures),
            "rollout/dropped_trajectories": float(summary.dropped),
            "rollout/seconds": summary.seconds,
            "rollout/turn_limit": float(summary.turn_limit),
            "throughput/generated_tokens_per_second": summary.tokens / summary.seconds,
            "collection": float(collection.index),
        }
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


def touched_turns(batch: RolloutBatch, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """The last token of each turn, and whether a token of its turn was clipped, both bool [B, T]."""
    following = torch.nn.functional.pad(batch.turn[:, 1:], (0, 1), value=-2)
    last = batch.generated & (following != batch.turn)
    turns = last.flip(1).cumsum(1).flip(1) * batch.generated  # numbers the turns of a row from its end
    counts = turns.new_zeros(turns.shape[0], int(turns.max()) + 1)
    counts.scatter_add_(1, turns, clipped.long())
    return last, counts.gather(1, turns) > 0
