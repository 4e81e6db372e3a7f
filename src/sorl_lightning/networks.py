"""A causal language model as a policy: log-probabilities of given tokens, without ever holding full logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from sorl_lightning.functional.logprobs import token_logprobs
from sorl_lightning.models import logit_scale
from sorl_lightning.padding_free import TokenStates, make_padding_free, token_states


class Readout(NamedTuple):
    """What a model knows at the N generated tokens of a batch, before its logits exist.

    ``hidden`` [N, D] is the last hidden state at the position that predicts each token, ``head_weight`` [V, D] the
    weight of the output layer: the logits are ``hidden @ head_weight.T``.
    """

    hidden: Tensor
    head_weight: Tensor


def common_vocabulary(student: Readout, teacher: Readout) -> tuple[Readout, Readout]:
    """Cut both heads to the tokens that both have, before any softmax: models of one tokenizer differ in padding."""
    size = min(len(student.head_weight), len(teacher.head_weight))
    return student._replace(head_weight=student.head_weight[:size]), teacher._replace(
        head_weight=teacher.head_weight[:size]
    )


def predicted(generated: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The generated tokens that something precedes: those with a log-probability."""
    generated = generated.clone()
    generated[:, 0] = False
    return generated


class PolicyNetwork(nn.Module):
    """A causal language model that answers with log-probabilities of given tokens.

    Args:
        model: any Hugging Face causal language model with a linear head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = make_padding_free(without_dropout(model))
        self.logit_scale = logit_scale(model)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        position_ids: Int[Tensor, "B T"],
        generated: Bool[Tensor, "B T"],
        temperature: float = 1.0,
        compare: Callable[[Readout, Tensor], Tensor] | None = None,
        value_head: nn.Module | None = None,
    ) -> tuple[Float[Tensor, "B T"], ...]:
        """Log-probability and entropy at each generated token, nats, and the N numbers of ``compare``; 0 elsewhere.

        With ``value_head``, a critic's head on this backbone, a last result: its value of the state after each token.

        The value at token t is that of ``input_ids[:, t]`` given the tokens before it: nothing is shifted for the
        caller. Rows are padded on the right. ``compare`` is called with the readout
        and the N log-probabilities in here, where the output layer of a sharded model is whole.
        """
        states = self._states(input_ids, position_ids, generated)
        generated = predicted(generated)
        readout = self._readout(states, generated)
        values = [*token_logprobs(*readout, input_ids[generated], temperature)]
        if compare is not None:
            values.append(compare(readout, values[0]))
        # A row of padding must still reach every parameter, or sharded backward passes wait for ever.
        blank = (states.hidden.sum() * 0.0).expand(generated.shape)
        outputs = tuple(blank.to(value.dtype).masked_scatter(generated, value) for value in values)
        return outputs if value_head is None else (*outputs, states.spread(value_head(states.hidden)))

    def readout(
        self, input_ids: Int[Tensor, "B T"], position_ids: Int[Tensor, "B T"], generated: Bool[Tensor, "B T"]
    ) -> Readout:
        """Hidden states at the generated tokens, and the output layer."""
        return self._readout(self._states(input_ids, position_ids, generated), predicted(generated))

    def _states(self, input_ids: Tensor, position_ids: Tensor, generated: Tensor) -> TokenStates:
        return token_states(self.model.base_model, input_ids, position_ids, generated)

    def _readout(self, states: TokenStates, generated: Tensor) -> Readout:
        hidden = states.before(generated)
        hidden = hidden * self.logit_scale if self.logit_scale != 1.0 else hidden
        return Readout(hidden, self.model.get_output_embeddings().weight)


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """The model in training mode with every dropout at 0: a policy must give the probabilities it was sampled with."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Many layers keep the probability as a number, under a name of their own: dropout, residual_dropout, layerdrop.
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.train()


def frozen(model: PreTrainedModel) -> PolicyNetwork:
    """An evaluation copy that never trains: the reference, or a teacher."""
    network = PolicyNetwork(copy.deepcopy(model)).eval()
    return network.requires_grad_(False)
