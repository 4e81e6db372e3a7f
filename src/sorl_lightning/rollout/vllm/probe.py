"""Do trainer and server compute the same? Both score one fixed sequence, and a few tokens that the server samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedModel

from sorl_lightning.errors import RolloutError
from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.vllm.fleet import Fleet
from sorl_lightning.rollout.vllm.wire import Answer
from sorl_lightning.types import Message, Task

logger = logging.getLogger(__name__)
PROMPT, SAMPLED = 24, 16  # tokens
TEMPERATURE = 0.5  # not 1: a server that leaves the temperature out of its log-probabilities shows


class Nowhere:
    """The environment of a request that belongs to no episode; not derived, or it would be listed for users."""

    def tasks(self, split: str) -> Sequence[Task]:
        """None."""
        return ()

    def reset(self, task: Task) -> Sequence[Message]:
        """Nothing."""
        return ()

    def step(self, text: str) -> Step:
        """Over at once."""
        return Step("", 0.0, True)


def probe_request(vocabulary: int, context: int) -> GenerationRequest:
    """The same request every time: token ids spread over the vocabulary, and a seed."""
    length = max(2, min(PROMPT, context - SAMPLED))
    return GenerationRequest(
        trajectory=TrajectoryKey(-1, 0),
        prompt_ids=tuple((7919 * position + 13) % vocabulary for position in range(length)),
        max_tokens=SAMPLED,
        stop_token_ids=(),
        temperature=TEMPERATURE,
        seed=0,
        environment=cast(Environment, Nowhere()),
    )


@torch.no_grad()
def largest_difference(policy: PreTrainedModel, request: GenerationRequest, answer: Answer) -> float:
    """Largest absolute difference of log-probabilities between the policy and the server's answer, nats.

    The prompt's tokens, where the server has scored them, are compared at temperature 1, at which servers score
    prompts, and the sampled ones at the request's.
    """
    ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]], device=policy.device)
    logits = policy(input_ids=ids, use_cache=False).logits[0, :-1].float()
    split = len(request.prompt_ids) - 1
    targets = ids[0, 1:, None]
    prompt = torch.log_softmax(logits[:split], -1).gather(-1, targets[:split])
    sampled = torch.log_softmax(logits[split:] / request.temperature, -1).gather(-1, targets[split:])
    own = torch.cat((prompt, sampled) if answer.prompt_logprobs else (sampled,))[:, 0]
    served = torch.tensor([*answer.prompt_logprobs, *answer.logprobs], device=policy.device)
    return float((own - served).abs().max())


def compare(policy: PreTrainedModel, fleet: Fleet, name: str, tolerance: float) -> float:
    """Largest difference to any server, which must hold the weights ``name``.

    Raises:
        RolloutError: it is above ``tolerance`` nats.
    """
    vocabulary = policy.config.get_text_config().vocab_size
    differences = [0.0]
    for server in fleet.servers:
        request = probe_request(vocabulary, server.context_limit)
        answer = fleet.loop.run(fleet.turn(server, request, name, probe=True))
        difference = largest_difference(policy, request, answer)
        logger.info("%s: log-probabilities differ by at most %.2g nats", server.client.url, difference)
        if not difference <= tolerance:
            raise RolloutError(
                f"{server.client.url} computes other log-probabilities than the trainer after new weights: they "
                f"differ by up to {difference:.3g} nats, VLLMEngine.probe_tolerance is {tolerance:g}. "
                "Types (--dtype) that differ need a larger tolerance; otherwise weights are missing on one side"
            )
        differences.append(difference)
    return max(differences)
