"""A training step over rows with and without padding, with and without shared openings, by trajectory and by turn.

    python benchmarks/rows.py --output rows.json

Forward and backward pass of a Llama's log-probabilities. Seconds of CPU, medians over repeats that alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from generation_by_turns import build_model
from torch import Tensor

from sorl_lightning.functional import lines
from sorl_lightning.functional.turns import row_lengths
from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.padding_free import ATTENTION
from sorl_lightning.rollout.micro_batches import balance

Rows = tuple[Tensor, Tensor, Tensor]


def network(options: argparse.Namespace) -> PolicyNetwork:
    """A Llama with random weights."""
    model = build_model(options.hidden, options.layers, options.vocabulary, 16384, tie_word_embeddings=False)
    return PolicyNetwork(model)


def step(policy: PolicyNetwork, micro_batches: list[Rows]) -> float:
    """Gradient of the sum of all log-probabilities; returns it for comparison."""
    policy.zero_grad()
    total = 0.0
    for ids, positions, generated in micro_batches:
        logprobs = policy(ids, positions, generated)[0].sum()
        logprobs.backward()
        total += float(logprobs.detach())
    return total


def step_with(policy: PolicyNetwork, padded: bool, micro_batches: list[Rows]) -> float:
    """``step`` with padding computed or not."""
    policy.model.set_attn_implementation("sdpa" if padded else ATTENTION)
    return step(policy, micro_batches)


def step_apart(policy: PolicyNetwork, micro_batches: list[Rows]) -> float:
    """``step`` with nothing shared between rows."""
    with patch.object(lines, "SHORTEST_ON_CPU", sys.maxsize):
        return step(policy, micro_batches)


def alternate(versions: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each version; their results must agree."""
    results = {name: version() for name, version in versions.items()}
    first = next(iter(results.values()))
    assert all(abs(result - first) <= 1e-4 * abs(first) for result in results.values()), results
    spent: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(repeats):
        for name, version in versions.items():
            start = time.process_time()
            version()
            spent[name].append(time.process_time() - start)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def rows_of(lengths: list[int], options: argparse.Namespace) -> Rows:
    """Rows of these lengths, of which every second run of 16 tokens was generated, the last tokens always."""
    ids = torch.randint(options.vocabulary, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    ends = torch.tensor(lengths)[:, None]
    generated = (places < ends) & ((places // 16 % 2 == 1) | (places >= ends - 8)) & (places > 0)
    return ids, places, generated


def cut(rows: Rows, parts: list[Tensor]) -> list[Rows]:
    """Micro-batches, each as wide as its longest row."""
    lengths = row_lengths(rows[2])
    return [tuple(part[index, : int(lengths[index].max())] for part in rows) for index in parts if len(index)]  # type: ignore[misc]


def padding(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lognormal lengths, in one micro-batch and in four."""
    policy = network(options)
    drawn = torch.distributions.LogNormal(4.8, options.sigma).sample((options.rows,))
    lengths = drawn.round().clamp(16, 1024).long().tolist()
    rows = rows_of(lengths, options)
    real = sum(row_lengths(rows[2]).tolist())
    found = []
    for count in (1, 4):
        cuts = {
            name: cut(rows, balance(row_lengths(rows[2]), count, padded=name == "padded"))
            for name in ("padded", "joined")
        }
        versions = {name: partial(step_with, policy, name == "padded", parts) for name, parts in cuts.items()}
        seconds = alternate(versions, options.repeats)
        tokens = sum(part[0].numel() for part in cuts["padded"])
        sizes = [int(row_lengths(part[2]).sum()) for part in cuts["joined"]]
        result = {
            "micro_batches": count,
            "real_tokens": real,
            "padded_tokens": tokens,
            "waste_of_padding": 1 - real / tokens,
            "waste_of_imbalance": 1 - real / (count * max(sizes)),
            "seconds": seconds,
            "speedup": seconds["padded"] / seconds["joined"],
            "floor": tokens / real,
        }
        result["share_of_floor"] = result["speedup"] / result["floor"]
        found.append(result)
        print(
            f"{count} micro-batches: {real} tokens, {tokens} with padding ({tokens / real:.2f}x); padded {seconds['padded']:.2f} s, "
            f"joined {seconds['joined']:.2f} s: {result['speedup']:.2f}x, {result['share_of_floor']:.0%} of the floor; "
            f"largest micro-batch {max(sizes)} tokens, {result['waste_of_imbalance']:.1%} over the mean"
        )
    return found


def turns(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trajectories of equal turns as one row each, and as a row for each turn with all that came before it.

    The latter as trainers of single turns compute them, and with what they share computed once.
    """
    policy, found = network(options), []
    for count in options.turns:
        width = options.turn_tokens
        ids = torch.randint(options.vocabulary, (4, count * width), generator=torch.Generator().manual_seed(0))
        places = torch.arange(count * width)
        generated = (places % width >= width // 2).expand(ids.shape)
        whole = [(ids, places.expand(ids.shape), generated)]
        single = []
        for row in range(len(ids)):
            lengths = [(turn + 1) * width for turn in range(count)]
            long = places < torch.tensor(lengths)[:, None]
            own = generated[row] & long & (places >= torch.tensor(lengths)[:, None] - width)
            single.append((ids[row].expand(count, -1), places.expand(count, -1), own))
        versions = {
            "one row": partial(step, policy, whole),
            "row a turn": partial(step_apart, policy, single),
            "shared": partial(step, policy, single),
        }
        seconds = alternate(versions, options.repeats)
        ratios = {name: seconds[name] / seconds["one row"] for name in ("row a turn", "shared")}
        found.append({"turns": count, "seconds": seconds, "ratios": ratios, "floor": (count + 1) / 2})
        print(
            f"{count:3} turns: one row {seconds['one row']:.3f} s; a row a turn {ratios['row a turn']:.2f} times as long, "
            f"with what they share once {ratios['shared']:.2f} times"
        )
    return found


def siblings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Two prompts of ``--prompt`` tokens with eight siblings each, by how much comes after them."""
    policy, found = network(options), []
    for own in options.own:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(options.vocabulary, (2, options.prompt), generator=generator).repeat_interleave(8, 0)
        ids = torch.cat([prompts, torch.randint(options.vocabulary, (16, own), generator=generator)], dim=1)
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        generated = (places >= options.prompt) & ((places - options.prompt) // 24 % 2 == 0)
        rows = [(ids, places, generated)]
        versions = {"apart": partial(step_apart, policy, rows), "shared": partial(step, policy, rows)}
        seconds = alternate(versions, options.repeats)
        ratio, floor = seconds["apart"] / seconds["shared"], ids.numel() / (2 * options.prompt + 16 * own)
        found.append({"own_tokens": own, "seconds": seconds, "ratio": ratio, "floor": floor})
        print(f"{options.prompt} tokens of prompt, {own} after: {ratio:.2f}x, fewer tokens {floor:.2f}x")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the lengths")
    parser.add_argument("--turns", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turn_tokens", type=int, default=32, help="tokens of a turn, half of them generated")
    parser.add_argument("--prompt", type=int, default=256, help="tokens that siblings open with")
    parser.add_argument(
        "--own", type=int, nargs="*", default=[24, 120, 480, 1200], help="tokens of siblings after them"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {"padding": padding(options), "turns": turns(options), "siblings": siblings(options)}
    if options.output:
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        options.output.write_text(
            json.dumps({"settings": settings, "torch": torch.__version__, **results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
