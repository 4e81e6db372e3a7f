"""LocalEngine beside transformers' own ``generate``, over the same requests: ragged prompts, turns and lengths.

    python benchmarks/engine_against_generate.py --output engine_against_generate.json

Several siblings of each task share its first prompt; every turn of a trajectory has a length of its own and adds an
observation. ``generate`` is called once a turn for all trajectories that still play, padded on the left, as trainers
without an engine do; it keeps nothing between turns. The engine plays in rounds and continuously. All sample the same
number of tokens. CPU and wall-clock seconds, medians over repeats that alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
import transformers
from generation_by_turns import build_model
from transformers import GenerationConfig, LlamaForCausalLM

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey, derive_seed
from sorl_lightning.rollout.engines.local import LocalEngine, WayToBatch


@dataclass(frozen=True, kw_only=True)
class Script:
    """What one trajectory is asked for: tokens to generate, and what is observed after, turn by turn.

    Attributes:
        waits: seconds until each observation is there.
    """

    prompt: tuple[int, ...]
    lengths: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]
    waits: tuple[float, ...]


def scripts(options: argparse.Namespace) -> list[Script]:
    """Lognormal lengths of turns and waits; 1 to ``turns`` turns."""
    generator, chance = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(options.vocabulary, (tokens,), generator=generator).tolist())

    prompts = [text(options.prompt + 7 * task) for task in range(options.trajectories // options.siblings)]
    found = []
    for number in range(options.trajectories):
        count = int(torch.randint(1, options.turns + 1, (1,), generator=generator))
        sizes = (torch.randn(count, generator=generator) * 0.6 + 3.0).exp().round().clamp(4, 96).int().tolist()
        observations = tuple(text(int(torch.randint(8, 48, (1,), generator=generator))) for _ in sizes)
        waits = tuple((options.latency * (torch.randn(count, generator=chance) - 0.5).exp()).tolist())
        prompt = prompts[number // options.siblings]
        found.append(Script(prompt=prompt, lengths=tuple(sizes), observations=observations, waits=waits))
    return found


async def _play(engine: LocalEngine, number: int, script: Script) -> int:
    key, ids = TrajectoryKey(str(number), 0), script.prompt
    for turn, (length, observation) in enumerate(zip(script.lengths, script.observations, strict=True)):
        request = GenerationRequest(
            trajectory=key, prompt_ids=ids, max_tokens=length, stop_token_ids=(), temperature=1.0,
            seed=derive_seed(number, turn), environment=None,  # type: ignore[arg-type]
        )  # fmt: skip
        completion = await engine.generate(request)
        await asyncio.sleep(script.waits[turn])
        ids = (*ids, *completion.token_ids, *observation)
    engine.release(key)
    return sum(script.lengths)


def with_engine(engine: LocalEngine, played: list[Script]) -> int:
    """All trajectories, turn by turn; the number of tokens generated."""

    async def collection() -> list[int]:
        for number in range(len(played)):
            engine.open(TrajectoryKey(str(number), 0))
        return await asyncio.gather(*(_play(engine, number, script) for number, script in enumerate(played)))

    return sum(asyncio.run(collection()))


@torch.inference_mode()
def with_generate(model: LlamaForCausalLM, played: list[Script]) -> int:
    """The same by one call a turn. A call runs to its longest turn, and what is beyond a trajectory's own is cut off."""
    ids, tokens = [list(script.prompt) for script in played], 0
    for turn in range(max(len(script.lengths) for script in played)):
        active = [number for number, script in enumerate(played) if turn < len(script.lengths)]
        width = max(len(ids[number]) for number in active)
        padded = torch.tensor([[0] * (width - len(ids[number])) + ids[number] for number in active])
        mask = torch.tensor([[0] * (width - len(ids[number])) + [1] * len(ids[number]) for number in active])
        longest = max(played[number].lengths[turn] for number in active)
        settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=longest, pad_token_id=0)
        output = model.generate(input_ids=padded, attention_mask=mask, generation_config=settings)
        for number, row in zip(active, output[:, width:].tolist(), strict=True):
            said = row[: played[number].lengths[turn]]
            ids[number] += [*said, *played[number].observations[turn]]
            tokens += len(said)
        time.sleep(max(played[number].waits[turn] for number in active))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--latency", type=float, default=0.0, help="mean seconds of an environment's step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(options.hidden, options.layers, options.vocabulary, 8192).eval()
    engines = {way: LocalEngine(batching=way, max_batch=options.max_batch) for way in get_args(WayToBatch)}
    for engine in engines.values():
        engine.attach(model)
        engine.load_weights(model.state_dict().items(), 0)
    results = []
    for turns in options.turns:
        played = scripts(argparse.Namespace(**{**vars(options), "turns": turns}))
        runs = {way: partial(with_engine, engine, played) for way, engine in engines.items()}
        runs["generate"] = partial(with_generate, model, played)
        spent: dict[str, dict[str, list[float]]] = {"cpu_s": {}, "s": {}}
        for repeat in range(options.repeats + 1):
            for name, run in runs.items():
                cpu, wall = time.process_time(), time.perf_counter()
                tokens = run()
                if repeat:
                    spent["cpu_s"].setdefault(name, []).append(time.process_time() - cpu)
                    spent["s"].setdefault(name, []).append(time.perf_counter() - wall)
        result = {"turns": turns, "generated_tokens": tokens}
        for clock, seconds in spent.items():
            speed = {name: tokens / statistics.median(taken) for name, taken in seconds.items()}
            ratios = {way: speed[way] / speed["generate"] for way in engines}
            result |= {f"tokens_per_{clock}": speed, f"ratios_{clock}": ratios}
            print(f"1 to {turns} turns, {tokens} tokens, per {clock}: generate {speed['generate']:.0f}", end="")
            print("".join(f", {way} {speed[way]:.0f} ({ratio:.2f}x)" for way, ratio in ratios.items()))
        results.append(result)
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        options.output.write_text(json.dumps({"settings": settings, **versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
