"""Leave a plain Hugging Face folder behind."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from sorl_lightning.control import Learner, owner_of
from sorl_lightning.exports import model_card, write_policy
from sorl_lightning.sharding import full_weights


class HFExport(Callback):
    """Save the policy, its tokenizer and a model card as a Hugging Face folder when training ends.

    The folder appears complete or not at all, and replaces an older one of the same name. Of a policy with adapters it
    holds these alone, as peft saves them; ``LoRA(adapters=folder)`` loads them again.

    Args:
        folder: where to; loads with ``AutoModelForCausalLM.from_pretrained``. None exports nothing.
        merge: of a policy with adapters, write the whole model with the adapters merged.
    """

    def __init__(self, folder: str | None = None, merge: bool = False) -> None:
        self.folder = folder
        self.merge = merge

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.folder is None:
            return
        learner = owner_of(Learner, pl_module)  # type: ignore[type-abstract]
        model, target = learner.policy_model, Path(self.folder)
        weights = {}
        for name, weight in full_weights(model):  # every rank must take part
            if trainer.is_global_zero:
                weights[name] = weight.cpu()
        if trainer.is_global_zero:
            card = model_card(target, model, learner.policy_version, _recipe(trainer), self.merge)
            write_policy(target, model, learner.tokenizer, weights, card, self.merge)


def _recipe(trainer: L.Trainer) -> str | None:
    """The run's config, where the command wrote one."""
    config = Path(trainer.log_dir or trainer.default_root_dir) / "config.yaml"
    return config.read_text() if config.exists() else None
