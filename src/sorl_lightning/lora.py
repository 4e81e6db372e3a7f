"""LoRA by peft: a few trained matrices beside weights that stay as they are (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sorl_lightning.adapters import PREFIX, WEIGHTS
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import Loaded, ModelSource


@dataclass(frozen=True, kw_only=True)
class LoRA(ModelSource):
    """Another source's model with trained low-rank adapters on it, which start as nothing.

    Checkpoints and exports hold the adapters alone; engines are given the merged weights. Dropout is not offered: a
    policy must give the probabilities that it was sampled with. Needs the extra: ``pip install
    'sorl-lightning[lora]'``.

    Args:
        base: where the model comes from.
        rank: of each adapter.
        alpha: an adapter's product is scaled by ``alpha / rank``.
        target_modules: names of the linear layers that get one; None is all of them but the output head.
        adapters: folder of adapters to go on from, as HFExport leaves it; its own rank, alpha and target modules hold.
        seed: of the adapters' first factors.
    """

    base: ModelSource
    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] | None = None
    adapters: str | None = None
    seed: int = 0

    def load(self) -> Loaded:
        """Load the base and put adapters on it.

        Raises:
            ConfigurationError: peft is missing, a setting is out of range, or no layer has one of the names.
        """
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigurationError(f"LoRA needs rank >= 1 and alpha > 0, got {self.rank} and {self.alpha}")
        if importlib.util.find_spec("peft") is None:
            raise ConfigurationError("LoRA needs peft: pip install 'sorl-lightning[lora]'")
        from peft import inject_adapter_in_model, set_peft_model_state_dict

        model, tokenizer = self.base.load()
        config, weights = self._fresh() if self.adapters is None else _read(self.adapters)
        config.base_model_name_or_path = model.name_or_path
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            try:
                inject_adapter_in_model(config, model)
            except ValueError as error:
                raise ConfigurationError(f"LoRA.target_modules={self.target_modules}: {error}") from error
        if weights:
            set_peft_model_state_dict(model, weights)
        return model, tokenizer

    def _fresh(self) -> tuple[Any, dict[str, Tensor]]:
        from peft import LoraConfig

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # peft says int, and divides
            lora_dropout=0.0,
            target_modules=self.target_modules or "all-linear",
            task_type="CAUSAL_LM",
        )
        return config, {}


def _read(folder: str) -> tuple[Any, dict[str, Tensor]]:
    """Configuration and weights of saved adapters; the weights without the prefix of peft's own wrapper."""
    from peft import LoraConfig

    file = Path(folder) / WEIGHTS
    if not file.exists():
        raise ConfigurationError(f"LoRA.adapters={folder!r} holds no {WEIGHTS}")
    config = LoraConfig.from_pretrained(folder, inference_mode=False)
    return config, {name.removeprefix(PREFIX): weight for name, weight in load_file(file).items()}
