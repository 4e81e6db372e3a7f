"""The learner: a policy, its frozen reference, one training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
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
from sorl_lightning.annotation import Annotator
from sorl_lightning.combinations import check_critic, check_reference, check_rows
from sorl_lightning.control import KLSchedule, TurnWeighting
from sorl_lightning.critic import Critic, explained_variance
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.figures import UpdateFigures, collection_figures, evaluation_figures
from sorl_lightning.functional.weights import blend
from sorl_lightning.held_out import held_out_figures
from sorl_lightning.loading import load_policy, load_reference
from sorl_lightning.models import ModelSource, source_of
from sorl_lightning.networks import PolicyNetwork, frozen
from sorl_lightning.objectives import Objective
from sorl_lightning.resuming import check_optimizers, check_origin, check_weights, trained_weights
from sorl_lightning.rollout.collection import Collection
from sorl_lightning.sharding import ShardingPlan, gradient_norm
from sorl_lightning.step_guard import StepGuard
from sorl_lightning.student_teacher import check_teacher, forward, meet
from sorl_lightning.teachers import FullTeacher, Teacher
from sorl_lightning.turn_records import TurnRecords
from sorl_lightning.types import LossTerms, RolloutBatch, Trajectory, TurnProfile, TurnStatistics
from sorl_lightning.value_networks import ValueHead, ValueNetwork


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
        self._figures = UpdateFigures()
        self._saved_optimizers: Sequence[Mapping[str, Any]] = ()
        self._turns: TurnRecords | None = None
        # Not registered as submodules: frozen models are neither trained, nor saved, nor set to training mode.
        self._frozen: dict[str, PolicyNetwork] = {}

    # Networks

    @override
    def configure_model(self) -> None:
        if self.policy is not None:
            return
        model, self.tokenizer = load_policy(self.source)
        if self.objective.needs_reference:
            other = self.reference_source
            reference = model if other is None else load_reference(other, self.source, self.tokenizer)
            self._frozen["reference"] = frozen(reference)
        if self.teacher is not None:
            vocabulary = model.get_output_embeddings().weight.shape[0]
            meet(self.objective, self.teacher, str(self.source), self.tokenizer, vocabulary, self.temperature)
        self.policy = PolicyNetwork(model)
        # Weights beside adapters never change, and are not in checkpoints.
        self.strict_loading = not has_adapters(model)
        if self.critic is not None:
            self.value_network = self.critic.network(self.source, model)
        if self.device_mesh is not None:
            plan: ShardingPlan = getattr(self.trainer.strategy, "sharding", ShardingPlan())
            critics = [] if self.value_network is None else [self.value_network]
            for network in (self.policy, *critics, *self._frozen.values()):
                plan.apply(network, self.device_mesh["data_parallel"])
            if isinstance(self.teacher, FullTeacher):
                self.teacher.shard(self.device_mesh["data_parallel"])

    @override
    def setup(self, stage: str) -> None:
        check_teacher(self.objective, self.teacher)
        if stage == "fit":
            check_reference(self.objective, self.reference_source)

    @property
    def policy_model(self) -> PreTrainedModel:
        """The Hugging Face model inside the policy."""
        if self.policy is None:
            raise RuntimeError("the policy is loaded by configure_model, which the Trainer calls")
        return self.policy.model

    @override
    def configure_optimizers(self) -> Any:
        parameters: Any = (p for p in self._policy().parameters() if p.requires_grad)
        if self.critic is not None and self.value_network is not None:
            parameters = [{"params": list(parameters)}, self.critic.parameter_group(self.value_network)]
        try:
            optimizer = self.optimizer(parameters)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"model.optimizer: {error}") from error
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # Rollouts

    def annotate(self, rows: RolloutBatch, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Advantages, and the log-probabilities and values that the objective needs beside those of the engine."""
        check_rows(self.objective, rows, self.trainer.accumulate_grad_batches)
        annotator = Annotator(
            objective=self.objective,
            policy=self._policy(),
            reference=self._frozen.get("reference"),
            critic=self.critic,
            value_network=self.value_network,
            teacher=self.teacher,
            turn_weighting=self.turn_weighting,
            temperature=self.temperature,
            device=self.device,
        )
        rows = annotator.annotate(rows, trajectories)
        self._explained_variance = None if self.critic is None else explained_variance(rows)
        return rows

    def _policy(self) -> PolicyNetwork:
        assert self.policy is not None
        return self.policy

    # Training

    @override
    def on_fit_start(self) -> None:
        if self.max_skipped_steps < 0:
            raise ConfigurationError(f"model.max_skipped_steps must be 0 or more, got {self.max_skipped_steps}")
        check_optimizers(self._saved_optimizers, self.trainer.optimizers)
        self.objective.check(self._data().group_size)
        check_critic(self.objective, self.critic)

    @override
    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self._figures.begin()
            self._log_collection(self._data().collection)
        parts = (self._policy(), self.objective, self.teacher)
        logprobs, entropy, values, batch = forward(*parts, batch, self.temperature, self.value_network)
        weights = blend(batch.trajectory_weights, batch.turn_weights, self.kl_schedule.turn_blend)
        terms, metrics = self.objective.terms(batch, logprobs, entropy, weights)
        if self.critic is not None and values is not None:
            terms = dataclasses.replace(terms, value=self.critic.loss(batch, values.roll(1, dims=1), weights))
        self.token_figures = {"entropy": entropy.detach(), **metrics}
        self.steps.add(terms.total, batch.generated)
        self._figures.add(batch, terms, self.token_figures, self.policy_version)
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
        if not self.steps.sound(norm):
            optimizer.zero_grad(set_to_none=True)  # without gradients an optimiser changes nothing, by decay either
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self._figures.add_norms(norm, self._gradient_norm())

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
        figures = self._figures.flush()
        figures["train/skipped_steps"] = torch.tensor(float(self.steps.skipped))
        figures["kl_schedule/turn_blend"] = torch.tensor(self.kl_schedule.turn_blend)
        for name, value in figures.items():
            self.log(name, value, prog_bar=name == "train/clip_fraction")
        self.log_dict({"collection": float(self.trainer.current_epoch), "policy_version": float(self.policy_version)})

    def _log_collection(self, collection: Collection | None) -> None:
        """Rollout figures, against the version of the weights that were rolled out."""
        if collection is None:
            return
        metrics = collection_figures(collection)
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
        figures = evaluation_figures(collection)
        figures |= held_out_figures(
            self._policy(), self.objective, self.teacher, collection.sound, self.temperature, self.device
        )
        for name, value in figures.items():
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
            checkpoint["state_dict"] = trained_weights(self, checkpoint["state_dict"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_origin(checkpoint, fitting=self.trainer.state.fn == TrainerFn.FITTING)
        if "state_dict" in checkpoint:  # FSDP2 has loaded, and taken it out
            check_weights(checkpoint["state_dict"], self.state_dict(), self.strict_loading)
        self._saved_optimizers = checkpoint.get("optimizer_states", ())
        self.policy_version = checkpoint["policy_version"]
        self.steps.load_state_dict(checkpoint["steps"])

    def _data(self) -> Any:
        return self.trainer.datamodule  # type: ignore[attr-defined]
