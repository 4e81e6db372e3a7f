"""Policy and reference, loaded from their sources."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import ModelSource


def load_policy(source: ModelSource) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy and its tokenizer.

    Raises:
        ConfigurationError: they cannot be loaded.
    """
    try:
        return source.load()
    except ConfigurationError as error:
        raise ConfigurationError(f"model.policy: {error}") from error


def load_reference(source: ModelSource, policy: ModelSource, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The reference of ``policy``, whose tokenizer is ``tokenizer``.

    Raises:
        ConfigurationError: it reads other tokens.
    """
    model, own = source.load()
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigurationError(f"reference {source} and policy {policy} have different vocabularies")
    return model
