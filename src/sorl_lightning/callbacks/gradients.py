"""Gradients of single loss terms, taken beside the one that the optimiser will see."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from sorl_lightning import ranks
from sorl_lightning.control import Learner, owner_of
from sorl_lightning.sharding import gradient_norm
from sorl_lightning.types import LossTerms

Gradients = list[Tensor | None]


def policy_parameters(module: object) -> list[nn.Parameter]:
    """The policy's trainable parameters; frozen ones (under adapters) have no gradient to look at."""
    model = owner_of(Learner, module).policy_model  # type: ignore[type-abstract]
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def bystanders(module: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters that are not the policy's: those of a critic."""
    own = {id(parameter) for parameter in policy_parameters(module)}
    return [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in own]


def gradients_of(term: Tensor, parameters: Sequence[nn.Parameter], beside: Sequence[nn.Parameter] = ()) -> Gradients:
    """Gradient of ``term`` for each parameter; the graph and all parameters' own gradients stay as they were.

    Args:
        term: a scalar.
        parameters: whose gradients are asked for.
        beside: others that the term may depend on: a critic's head on the policy's backbone.
    """
    if not term.requires_grad:
        return [None] * len(parameters)
    everyone = [*parameters, *beside]
    kept = [parameter.grad for parameter in everyone]
    for parameter in everyone:
        parameter.grad = None
    # Strategies average over ranks, whose terms add. Shards are gathered into other leaves, so there all are visited.
    (term * ranks.count()).backward(retain_graph=True, inputs=list(parameters) if ranks.count() == 1 else None)
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(everyone, kept, strict=True):
        parameter.grad = gradient
    return gradients


def added(total: Gradients | None, gradients: Gradients) -> Gradients:
    """Sum of two lists of gradients, the first of which is given up."""
    if total is None:
        return gradients
    pairs = zip(total, gradients, strict=True)
    return [new if old is None else old if new is None else old.add_(new) for old, new in pairs]


def norm(gradients: Gradients) -> float:
    """Global L2 norm; norms of micro-batches do not add, so this is taken of the accumulated vector."""
    return float(gradient_norm(gradient for gradient in gradients if gradient is not None))


def rest_norm(parameters: Sequence[nn.Parameter], others: Gradients | None) -> float:
    """L2 norm of the parameters' gradient less ``others``: the policy's own part."""
    others = others or [None] * len(parameters)
    pairs = [(parameter.grad, other) for parameter, other in zip(parameters, others, strict=True)]
    return norm([grad if grad is None or other is None else grad - other for grad, other in pairs])


def other_terms(terms: LossTerms) -> Tensor | None:
    """All that is in the loss beside the policy's part; None where nothing is."""
    others = [term for term in (terms.regularizer, terms.value) if term is not None]
    return sum(others[1:], others[0]) if others else None


def has_clipped(terms: LossTerms) -> bool:
    """Whether a token of the micro-batch was clipped, on any rank."""
    return terms.clip_bias is not None and terms.clipped is not None and ranks.anywhere(bool(terms.clipped.any()))
