"""A policy as everyone else's tools take it: a plain Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.adapters import has_adapters, save_adapters

CARD = """---
library_name: {library}
pipeline_tag: text-generation
tags: [reinforcement-learning, multi-turn, sorl-lightning]
---

# {title}

A causal language model post-trained on multi-turn episodes with [sorl-lightning](https://pypi.org/project/sorl-lightning)
{version}{base}. Its weights have taken {updates} optimiser steps{adapters}.

```python
{loading}
```
{recipe}"""
PLAIN = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})"""
ADAPTERS = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})"""
RECIPE = """
## Recipe

`sorl fit --config recipe.yaml` with this file:

```yaml
{recipe}
```
"""


def write_policy(
    target: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor],
    card: str,
    merge: bool = False,
) -> None:
    """Write safetensors, configuration, generation configuration, tokenizer and model card.

    The folder appears complete or not at all, and replaces an older one of the same name.

    Args:
        model: the policy; its adapters, if it has any, are written alone unless ``merge``.
        weights: its parameters by their plain names, adapters merged, as ``sharding.full_weights`` yields them.
        card: text of README.md, as ``model_card`` writes it.
        merge: write the whole model with its adapters merged.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    if not has_adapters(model):
        model.save_pretrained(unfinished, state_dict=dict(weights))
    elif merge:
        _without_adapters(model, weights).save_pretrained(unfinished)
    else:
        save_adapters(model, unfinished)
    if merge or not has_adapters(model):
        _generation(model, tokenizer).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def model_card(
    folder: Path, model: PreTrainedModel, updates: int, recipe: str | None = None, merge: bool = False
) -> str:
    """What the model is and how it came about.

    Args:
        folder: its name is the title.
        updates: optimiser steps that its weights have taken.
        recipe: the run's config.
        merge: whether adapters are merged.
    """
    adapters = has_adapters(model) and not merge
    loading = (ADAPTERS if adapters else PLAIN).format(folder=folder.name)
    base = f", from `{model.name_or_path}`" if model.name_or_path else ""
    return CARD.format(
        library="peft" if adapters else "transformers",
        title=folder.name,
        version=version("sorl-lightning"),
        base=base,
        updates=updates,
        adapters="; these are its adapters alone" if adapters else "",
        loading=loading,
        recipe="" if recipe is None else RECIPE.format(recipe=recipe.strip()),
    )


def _without_adapters(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(dict(weights), strict=False, assign=True)
    plain.tie_weights()
    return plain


def _generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The model's own settings; the tokenizer's tokens where the model names none."""
    settings = GenerationConfig.from_dict(model.generation_config.to_dict() if model.generation_config else {})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(tokenizer, name))
    return settings
