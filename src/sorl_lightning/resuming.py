"""What a checkpoint holds of a learner, and what a run may resume from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sorl_lightning.errors import ConfigurationError

ADDED = {"initial_lr"}  # to an optimiser's settings, by schedulers


def trained_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the ``weights`` of ``module`` that training changes."""
    everything = module.named_parameters(remove_duplicate=False)  # tied ones have several names
    unchanging = {name for name, parameter in everything if not parameter.requires_grad}
    return {name: weights[name] for name in weights if name not in unchanging}


def check_origin(checkpoint: Mapping[str, Any], fitting: bool) -> None:
    """Refuse what no AgentModule has saved, and to train on from the middle of a collection.

    Raises:
        ConfigurationError: as said.
    """
    if "policy_version" not in checkpoint:
        raise ConfigurationError("ckpt_path was not saved by an AgentModule: it has no policy_version")
    if fitting and not checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]:
        raise ConfigurationError(
            "ckpt_path was saved in the middle of a collection, whose other trajectories are lost; resume from one "
            "that was saved at the end of a collection (checkpoint.save_on_train_epoch_end, the default)"
        )


def check_weights(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], whole: bool) -> None:
    """Refuse weights of another model.

    Args:
        saved: of the checkpoint.
        own: of the module that resumes.
        whole: whether ``saved`` must hold all of ``own``.

    Raises:
        ConfigurationError: names the first tensor that does not fit.
    """
    differing = (name for name in saved if name not in own or saved[name].shape != own[name].shape)
    lacking = (name for name in own if whole and name not in saved)
    name = next(chain(differing, lacking), None)
    if name is not None:
        there, here = (list(side[name].shape) if name in side else "missing" for side in (saved, own))
        raise ConfigurationError(
            "ckpt_path was saved with another model.policy or model.critic: its weight "
            f"{name} is {there} there and {here} here"
        )


def check_optimizers(saved: Sequence[Mapping[str, Any]], own: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse the memory of another optimiser.

    Raises:
        ConfigurationError: settings or groups of parameters differ.
    """
    for state, optimizer in zip(saved, own, strict=False):
        theirs, ours = (sorted({*groups[0]} - ADDED) for groups in (state["param_groups"], optimizer.param_groups))
        if theirs != ours or len(state["param_groups"]) != len(optimizer.param_groups):
            raise ConfigurationError(
                f"ckpt_path was saved with another model.optimizer than {type(optimizer).__name__}: its settings are "
                f"{', '.join(theirs)}"
            )
