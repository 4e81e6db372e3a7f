"""Where causal language models come from."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.assets import asset_folder
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class ModelSource(Interface):
    """Where a model comes from; ``load`` gives the same weights on every call."""

    @abstractmethod
    def load(self) -> Loaded:
        """The model and its tokenizer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pretrained(ModelSource):
    """A Hugging Face causal language model, by folder or Hub id.

    Args:
        path: folder with safetensors, configuration and tokenizer, or a Hub id.
        dtype: type of the weights.
        attn_implementation: attention kernel, as transformers names them; None lets transformers choose.
        gradient_checkpointing: recompute activations in the backward pass.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False

    def load(self) -> Loaded:
        """Read the folder or the Hub.

        Raises:
            ConfigurationError: there is no such model, or its log-probabilities cannot be computed in chunks.
        """
        check_place(self.path)
        tokenizer = load_tokenizer(self.path)
        if (Path(self.path) / "adapter_config.json").exists():
            raise ConfigurationError(
                f"policy path {self.path!r} holds adapters alone: take the source sorl_lightning.lora.LoRA, with "
                "adapters set to this folder and base to the model that they were trained on"
            )
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=getattr(torch, self.dtype), attn_implementation=self.attn_implementation
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"policy path {self.path!r} holds no causal language model: {error}") from error
        if self.gradient_checkpointing:
            recompute_activations(model)
        check_head(model)
        return model, tokenizer


@dataclass(frozen=True, kw_only=True)
class SmallLlama(ModelSource):
    """A small Llama with random weights, to be trained from scratch.

    Args:
        tokenizer: folder or Hub id of its tokenizer, which also gives the vocabulary; "sorl:textworld" is the one that
            ships with the package.
        hidden_size: width; a multiple of ``head_dim``.
        num_hidden_layers: decoder layers.
        head_dim: width of an attention head; 32 or 64, so that vLLM can serve the model.
        context_length: most positions, tokens.
        seed: seed of the initial weights; the global generator is left alone.

    Raises:
        ConfigurationError: a size below 1, or a ``hidden_size`` that is not a multiple of ``head_dim``.
    """

    tokenizer: str
    hidden_size: int = 128
    num_hidden_layers: int = 2
    head_dim: Literal[32, 64] = 32
    context_length: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "context_length"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"policy.{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.head_dim:
            raise ConfigurationError(
                f"policy.hidden_size must be a multiple of head_dim={self.head_dim}, got {self.hidden_size}"
            )

    def load(self) -> Loaded:
        """Build the model."""
        tokenizer = load_tokenizer(self.tokenizer)
        heads = self.hidden_size // self.head_dim
        config = LlamaConfig(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context_length,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def source_of(policy: ModelSource | str) -> ModelSource:
    """A source as it is; text is a folder or Hub id."""
    return Pretrained(path=policy) if isinstance(policy, str) else policy


def recompute_activations(model: PreTrainedModel) -> None:
    """Trade time for memory: keep no activations of a layer, compute them again in the backward pass."""
    # The older name is deprecated where the newer one exists.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def check_place(path: str, what: str = "model") -> None:
    """Refuse a place of a model or tokenizer that is neither a folder nor can be a Hub id, without asking the Hub.

    Raises:
        ConfigurationError: it is a file, or looks like a folder that is not there.
    """
    place = Path(path)
    if place.is_file():
        raise ConfigurationError(
            f"{path!r} is a file, and a {what} is a folder or a Hub id: sorl export CHECKPOINT FOLDER makes a folder "
            "of a checkpoint"
        )
    hub_id = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    if not hub_id and not place.is_dir():
        raise ConfigurationError(f"no {what} at {path!r}: there is no such folder, and a Hub id is NAME or OWNER/NAME")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; "sorl:NAME" is one that ships with the package.

    Raises:
        ConfigurationError: there is none.
    """
    check_place(path, "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(asset_folder(path))
    except (OSError, ValueError) as error:
        hint = "" if Path(path).is_dir() else f" (and there is no folder {path!r} here)"
        raise ConfigurationError(f"{path!r} holds no tokenizer: {str(error).splitlines()[0]}{hint}") from error


def logit_scale(model: PreTrainedModel) -> float:
    """Factor that the model puts between its head and its logits.

    Raises:
        ConfigurationError: the model squashes its logits (soft-capping) or its head has a bias.
    """
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):
        raise ConfigurationError(
            f"{type(model).__name__} soft-caps its logits (final_logit_softcapping={config.final_logit_softcapping}), "
            "which chunked log-probabilities do not support; use a model without it"
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigurationError(f"the output head of {type(model).__name__} has a bias, which is not supported")
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    return float(getattr(config, "logit_scale", None) or 1.0)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Compare the model's own logits with the ones that a ``PolicyNetwork`` makes of its hidden states.

    Raises:
        ConfigurationError: they differ, so the model does something between hidden states and logits that is unknown.
    """
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    training = model.training
    model.eval()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    rebuilt = (hidden @ model.get_output_embeddings().weight.T).float() * logit_scale(model)
    model.train(training)
    if not torch.allclose(logits, rebuilt, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
        raise ConfigurationError(
            f"{type(model).__name__} changes its logits after the head in a way that is not supported"
        )
