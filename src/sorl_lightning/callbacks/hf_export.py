"""Leave a plain Hugging Face folder behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from sorl_lightning.adapters import has_adapters, save_adapters
from sorl_lightning.control import Learner, owner_of
from sorl_lightning.sharding import full_weights


class HFExport(Callback):
    """Save the policy and its tokenizer as a Hugging Face folder when training ends.

    The folder appears complete or not at all, and replaces an older one of the same name. Of a policy with adapters it
    holds these alone, as peft saves them; ``LoRA(adapters=folder)`` loads them again.

    Args:
        folder: where to; loads with ``AutoModelForCausalLM.from_pretrained``. None exports nothing.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.folder is None:
            return
        learner = owner_of(Learner, pl_module)  # type: ignore[type-abstract]
        weights = {}
        for name, weight in full_weights(learner.policy_model):  # every rank must take part
            if trainer.is_global_zero:
                weights[name] = weight.cpu()
        if not trainer.is_global_zero:
            return
        target = Path(self.folder)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        if has_adapters(learner.policy_model):
            save_adapters(learner.policy_model, unfinished)
        else:
            learner.policy_model.save_pretrained(unfinished, state_dict=weights)
        learner.tokenizer.save_pretrained(unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
