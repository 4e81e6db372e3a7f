"""A LocalEngine on tiny models, and ragged trajectories for it to play."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey, derive_seed
from sorl_lightning.rollout.engines.local import LocalEngine
from sorl_lightning.rollout.environment import Step
from sorl_lightning.types import Completion

VOCABULARY = 40
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # spread logits: tokens with clear margins
}


class Nowhere:
    """An environment that language models ignore."""

    def tasks(self, split: str) -> list[Any]:
        return []

    def reset(self, task: Any) -> list[Any]:
        return []

    def step(self, text: str) -> Step:
        return Step("", 0.0, True)


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes}))


def qwen2(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes}))


def serve(model: PreTrainedModel, version: int = 0, **settings: Any) -> LocalEngine:
    engine = LocalEngine(**settings)
    engine.attach(model)
    engine.load_weights(model.state_dict().items(), version)
    return engine


def request(prompt_ids: Sequence[int], key: tuple[int, int] = (0, 0), **changes: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"max_tokens": 6, "stop_token_ids": (), "temperature": 1.0, "seed": 0, **changes}
    return GenerationRequest(
        trajectory=TrajectoryKey(*key), prompt_ids=tuple(prompt_ids), environment=Nowhere(), **settings
    )


def ask(
    engine: LocalEngine, *requests: GenerationRequest, opens: bool = True, release: bool = True
) -> list[Completion]:
    """One round of these requests, in the order given."""

    async def together() -> list[Completion]:
        for r in requests:
            if opens:
                engine.open(r.trajectory)
        completions = await asyncio.gather(*(engine.generate(r) for r in requests))
        if release:
            for r in requests:
                engine.release(r.trajectory)
        return completions

    return asyncio.run(together())


Played = list[tuple[GenerationRequest, Completion]]
KEYS = [TrajectoryKey(task, sibling) for task in range(4) for sibling in range(3)]


def play_all(
    engine: LocalEngine,
    keys: Sequence[TrajectoryKey] = tuple(KEYS),
    turns: Callable[[TrajectoryKey], int] = lambda key: 2 + (key.task + key.sibling) % 4,
    delay: Callable[[TrajectoryKey, int], int] = lambda key, turn: 0,
    temperature: float = 1.0,
) -> dict[TrajectoryKey, Played]:
    """Play ragged trajectories: prompts, observations, turns and stops of many lengths."""

    async def play(key: TrajectoryKey) -> Played:
        dice = random.Random(key.task)
        prompt_ids = tuple(dice.randrange(VOCABULARY) for _ in range(3 + 4 * key.task))
        played = []
        for turn in range(turns(key)):
            for _ in range(delay(key, turn)):
                await asyncio.sleep(0)
            seed = derive_seed(key.task, key.sibling, turn)
            asked = request(prompt_ids, key, seed=seed, stop_token_ids=(5, 6, 7), temperature=temperature)
            completion = await engine.generate(asked)
            played.append((asked, completion))
            observation = [dice.randrange(VOCABULARY) for _ in range(1 + (key.sibling * 5 + turn) % 7)]
            prompt_ids = (*prompt_ids, *completion.token_ids, *observation)
        engine.release(key)
        return played

    async def together() -> list[Played]:
        for key in keys:
            engine.open(key)
        return await asyncio.gather(*(play(key) for key in keys))

    return dict(zip(keys, asyncio.run(together()), strict=True))


@torch.no_grad()
def full_logprobs(model: PreTrainedModel, asked: GenerationRequest, completion: Completion) -> list[float]:
    """The completion's log-probabilities by one plain forward pass over everything."""
    ids = torch.tensor([asked.prompt_ids + completion.token_ids])
    logits = model.eval()(input_ids=ids).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (asked.temperature or 1.0), -1)
    return logprobs.gather(1, ids[0, len(asked.prompt_ids) :, None])[:, 0].tolist()


def tokens_of(played: dict[TrajectoryKey, Played]) -> dict[TrajectoryKey, list[tuple[int, ...]]]:
    return {key: [completion.token_ids for _, completion in turns] for key, turns in played.items()}


def logprobs_of(played: dict[TrajectoryKey, Played]) -> dict[TrajectoryKey, list[tuple[float, ...]]]:
    return {key: [completion.logprobs for _, completion in turns] for key, turns in played.items()}
