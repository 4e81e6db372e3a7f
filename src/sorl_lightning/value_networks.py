"""Networks that value the state after each token: a head on the policy's backbone, or a network of its own."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from sorl_lightning.networks import PolicyNetwork, without_dropout
from sorl_lightning.padding_free import make_padding_free, token_states
from sorl_lightning.types import RolloutBatch


class ValueHead(nn.Module):
    """A value after each token, from hidden states. It starts at 0, so an untrained critic values every state at 0.

    Args:
        model: whose hidden states are valued.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.linear = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N"]:
        """Value of the state after each token."""
        return self.linear(hidden).squeeze(-1)


class ValueNetwork(nn.Module):
    """A value after each token, from a backbone of its own.

    Args:
        model: a causal language model, of which only the backbone is kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = make_padding_free(without_dropout(model)).base_model
        self.head = ValueHead(model)

    def forward(
        self, input_ids: Int[Tensor, "B T"], position_ids: Int[Tensor, "B T"], generated: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Value of the state after each token, up to a row's last generated one."""
        states = token_states(self.backbone, input_ids, position_ids, generated)
        return states.spread(self.head(states.hidden))


def values_after(
    network: ValueHead | ValueNetwork, policy: PolicyNetwork, batch: RolloutBatch, temperature: float
) -> Tensor:
    """The critic's value of the state after each token, [B, T]."""
    if isinstance(network, ValueNetwork):
        own: Tensor = network(batch.input_ids, batch.position_ids, batch.generated)
        return own
    inputs = (batch.input_ids, batch.position_ids, batch.generated, temperature)
    shared: Tensor = policy(*inputs, value_head=network)[2]
    return shared
