"""Time of generating 1 to 32 equal turns, with keys and values kept between turns and without.

    python benchmarks/generation_by_turns.py --output generation_by_turns.json

With the cache kept, a turn costs its own tokens and their look at the past; without it, every turn pays for the whole
past again. So the time of 32 turns over that of 8 tells the two apart: 4 is the least for the first, 16 for the second,
and both rise with the share of attention in the whole (small models, long observations).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from sorl_lightning.rollout.engine import GenerationRequest, TrajectoryKey, derive_seed
from sorl_lightning.rollout.engines.local import LocalEngine

TURNS = (1, 2, 4, 8, 16, 32)


def build_model(hidden_size: int, layers: int, vocabulary: int, positions: int, **settings: Any) -> LlamaForCausalLM:
    """A Llama with random weights and, if ``settings`` of its configuration do not say otherwise, heads of width 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        **{
            "num_attention_heads": hidden_size // 32,
            "num_key_value_heads": hidden_size // 32,
            "head_dim": 32,
            "tie_word_embeddings": True,
            **settings,
        },
    )
    return LlamaForCausalLM(config)


async def play(engine: LocalEngine, key: TrajectoryKey, turns: int, options: argparse.Namespace, reuse: bool) -> None:
    """One trajectory of ``turns`` turns of equal length, with random observations."""
    generator = torch.Generator().manual_seed(derive_seed(key.task))

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(options.vocabulary, (tokens,), generator=generator).tolist())

    prompt_ids = text(options.prompt)
    for turn in range(turns):
        completion = await engine.generate(
            GenerationRequest(
                trajectory=key,
                prompt_ids=prompt_ids,
                max_tokens=options.completion,
                stop_token_ids=(),
                temperature=1.0,
                seed=derive_seed(key.task, turn),
                environment=None,  # type: ignore[arg-type]
            )
        )
        prompt_ids = (*prompt_ids, *completion.token_ids, *text(options.observation))
        if not reuse:
            engine.drop_caches()
    engine.release(key)


def measure(engine: LocalEngine, turns: int, options: argparse.Namespace, reuse: bool) -> dict[str, float]:
    """Seconds of one collection of ``turns`` turns."""
    keys = [TrajectoryKey(task, 0) for task in range(options.trajectories)]

    async def collection() -> None:
        for key in keys:
            engine.open(key)
        await asyncio.gather(*(play(engine, key, turns, options, reuse) for key in keys))

    forwarded, cpu, wall = engine.forwarded_tokens, time.process_time(), time.perf_counter()
    asyncio.run(collection())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    generated = options.trajectories * turns * options.completion
    return {
        "turns": turns,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "generated_tokens": generated,
        "generated_tokens_per_cpu_second": generated / cpu,
        "forwarded_tokens": engine.forwarded_tokens - forwarded,
    }


def sweep(engine: LocalEngine, options: argparse.Namespace, reuse: bool) -> list[dict[str, float]]:
    """The best collection by CPU time for each number of turns; they take turns, so that noise hits all alike."""
    rounds = [[measure(engine, turns, options, reuse) for turns in TURNS] for _ in range(options.repeats)]
    return [min(results, key=lambda result: result["cpu_seconds"]) for results in zip(*rounds, strict=True)]


def report(rows: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Print the table; the ratio of 32 turns to 8 in each way, by CPU time."""
    ratios = {}
    print(f"{'':10} {'turns':>5} {'CPU s':>8} {'wall s':>8} {'generated tokens / CPU s':>25} {'forwarded tokens':>17}")
    for name, measured in rows.items():
        for row in measured:
            print(
                f"{name:10} {row['turns']:5} {row['cpu_seconds']:8.3f} {row['wall_seconds']:8.3f} "
                f"{row['generated_tokens_per_cpu_second']:25.0f} {row['forwarded_tokens']:17}"
            )
        seconds = {row["turns"]: row["cpu_seconds"] for row in measured}
        ratios[name] = seconds[32] / seconds[8]
        print(f"{name:10} time(32 turns) / time(8 turns) = {ratios[name]:.2f}")
    return ratios


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=30, help="tokens of the first prompt")
    parser.add_argument("--completion", type=int, default=4, help="tokens generated a turn")
    parser.add_argument("--observation", type=int, default=4, help="tokens of each observation")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    positions = options.prompt + max(TURNS) * (options.completion + options.observation)
    model = build_model(options.hidden_size, options.layers, options.vocabulary, positions)
    engine = LocalEngine()
    engine.attach(model)
    engine.load_weights(model.state_dict().items(), version=0)
    measure(engine, max(TURNS), options, reuse=True)  # the cache grows to its full length here
    rows = {"reuse": sweep(engine, options, reuse=True), "no reuse": sweep(engine, options, reuse=False)}
    ratios = report(rows)
    if options.output is not None:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        content = {"settings": settings, "about": about, "rows": rows, "time_32_over_8": ratios}
        options.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
