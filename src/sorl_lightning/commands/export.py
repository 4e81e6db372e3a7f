"""``sorl export CKPT FOLDER``: a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser

from sorl_lightning.commands.targets import absent
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.exports import model_card, write_policy
from sorl_lightning.models import Loaded, ModelSource, source_of
from sorl_lightning.sharding import full_weights

PREFIX = "policy.model."  # of the policy's weights in a checkpoint


def export(checkpoint: str, folder: str, config: str | None = None, merge: bool = False) -> None:
    """Write a checkpoint's policy as a folder that transformers and vLLM load.

    Args:
        checkpoint: file that a run saved.
        folder: where to write; must not exist.
        config: the run's config; by default the config.yaml of the run that the checkpoint lies in.
        merge: of a policy with adapters, write the whole model with the adapters merged.
    """
    target = absent(folder)
    saved = read(Path(checkpoint))
    recipe = Path(config) if config is not None else beside(Path(checkpoint))
    model, tokenizer = policy_of(recipe)
    restore(model, saved["state_dict"], checkpoint)
    weights = {name: weight.cpu() for name, weight in full_weights(model)}
    card = model_card(target, model, saved["policy_version"], recipe.read_text(), merge)
    write_policy(target, model, tokenizer, weights, card, merge)
    print(f"sorl: wrote the policy after {saved['policy_version']} optimiser steps to {target}")


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds.

    Raises:
        ConfigurationError: there is none, it is in shards, or it is not of a run of this package.
    """
    if path.is_dir():
        raise ConfigurationError(
            f"checkpoint {str(path)!r} is a folder with a file a rank: join them first, with "
            f"python -m lightning.fabric.utilities.consolidate_checkpoint {path}"
        )
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # whatever unpickling foreign bytes may raise
        raise ConfigurationError(
            f"checkpoint {str(path)!r} cannot be read, name one that a run saved, as RUN/checkpoints/last.ckpt: {error}"
        ) from error
    if not isinstance(saved, dict) or not {"state_dict", "policy_version"} <= saved.keys():
        raise ConfigurationError(f"checkpoint {str(path)!r} is not of a run of sorl")
    return saved


def beside(checkpoint: Path) -> Path:
    """The config of the run that a checkpoint lies in.

    Raises:
        ConfigurationError: there is none.
    """
    found = next((p / "config.yaml" for p in checkpoint.resolve().parents if (p / "config.yaml").is_file()), None)
    if found is None:
        raise ConfigurationError(f"there is no config.yaml above {str(checkpoint)!r}: name the run's with --config")
    return found


def policy_of(config: Path) -> Loaded:
    """The initial policy and its tokenizer, as the run's config describes them.

    Raises:
        ConfigurationError: the config cannot be read, or has no policy that loads.
    """
    try:
        content = yaml.safe_load(config.read_text())
        policy = {"policy": content["model"]["policy"]}
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise ConfigurationError(f"config {str(config)!r} has no model.policy: {error}") from error
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=ModelSource | str)
    return source_of(parser.instantiate_classes(parser.parse_object(policy)).policy).load()


def restore(model: torch.nn.Module, weights: dict[str, torch.Tensor], checkpoint: str) -> None:
    """Fill ``model`` with a checkpoint's weights; those that it lacks are the ones that never change.

    Raises:
        ConfigurationError: they are of another model.
    """
    own = {name.removeprefix(PREFIX): weight for name, weight in weights.items() if name.startswith(PREFIX)}
    try:
        missing, unexpected = model.load_state_dict(own, strict=False)
    except RuntimeError as error:
        raise ConfigurationError(f"checkpoint {checkpoint!r} is of another model than its config: {error}") from error
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unexpected or not own or trained & set(missing):
        raise ConfigurationError(f"checkpoint {checkpoint!r} is of another model than its config names")
