"""How many tokens a trajectory may have, and whether a micro-batch holds them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from sorl_lightning.errors import ConfigurationError


def context_in_force(model: PreTrainedModel, context_limit: int | None, name: str = "data.context_limit") -> int:
    """Most tokens of a trajectory: ``context_limit``, the setting ``name``, or without one all positions of the model.

    Raises:
        ConfigurationError: the model has fewer positions, or does not say how many; the limit is below 1.
    """
    config = model.config.get_text_config()
    positions: int | None = getattr(config, "max_position_embeddings", None)
    limit = context_limit if context_limit is not None else positions
    if limit is None:
        raise ConfigurationError(f"the model does not say how many positions it has: set {name}")
    if limit < 1:
        raise ConfigurationError(f"{name} must be at least 1, got {limit}")
    if positions is not None and limit > positions:
        raise ConfigurationError(
            f"{name}={limit} is more than the model's {positions} positions (max_position_embeddings)"
        )
    return limit


def check_token_budget(token_budget: int | None, context_limit: int) -> None:
    """Refuse a budget that one row may exceed.

    Raises:
        ConfigurationError: as said.
    """
    if token_budget is not None and token_budget < context_limit:
        raise ConfigurationError(
            f"data.token_budget={token_budget} tokens a micro-batch is less than a row may have, "
            f"data.context_limit={context_limit}: raise the budget or lower the limit"
        )


def check_prompts(lengths: Sequence[int], token_budget: int | None, mini_batches: int, micro_batches: int) -> None:
    """Refuse a budget that the first prompts alone exceed, each with one generated token.

    Args:
        lengths: tokens of each first prompt.

    Raises:
        ConfigurationError: as said.
    """
    least, parts = sum(lengths) + len(lengths), mini_batches * micro_batches
    if token_budget is not None and least > token_budget * parts:
        raise ConfigurationError(
            f"data.token_budget={token_budget} tokens a micro-batch is too small: the {len(lengths)} first "
            f"prompts have {least - len(lengths)} tokens, for mini_batches={mini_batches} x "
            f"micro_batches={micro_batches} micro-batches; raise data.micro_batches or the budget"
        )
