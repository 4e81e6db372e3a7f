"""Time and memory of ``token_logprobs`` beside log_softmax + gather, forward and backward.

    python benchmarks/token_logprobs.py --output token_logprobs.json

Memory is the rise of a fresh process's peak resident size over its inputs (the gradients of both inputs count). Time is
the median over repeats that alternate between the versions in one process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sorl_lightning.functional.logprobs import token_logprobs

LIMITS = {"time": 1.6, "memory": 1 / 8}


def plain(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the targets' log-probabilities, by way of all logits."""
    return (hidden @ head_weight.T).log_softmax(-1).gather(1, targets[:, None]).sum()


def plain_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """The same plus the sum of the entropies."""
    logprobs = (hidden @ head_weight.T).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).sum() - (logprobs.exp() * logprobs).sum()


def chunked(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """Sum of the targets' log-probabilities, chunk by chunk."""
    return token_logprobs(hidden, head_weight, targets, chunk_size=chunk_size)[0].sum()


def chunked_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """The same plus the sum of the entropies."""
    logprobs, entropy = token_logprobs(hidden, head_weight, targets, chunk_size=chunk_size)
    return logprobs.sum() + entropy.sum()


def versions(chunk_size: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """What is compared, by name."""
    return {
        "plain": plain,
        "plain with entropy": plain_entropy,
        "chunked": partial(chunked, chunk_size=chunk_size),
        "chunked with entropy": partial(chunked_entropy, chunk_size=chunk_size),
    }


def make_inputs(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states, head and targets, allocated and touched."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.width, generator=generator).requires_grad_()
    head_weight = torch.randn(arguments.vocabulary, arguments.width, generator=generator).mul_(0.05).requires_grad_()
    return hidden, head_weight, torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator)


def peak_rise(arguments: argparse.Namespace) -> float:
    """MiB by which one forward and backward raises this process's peak; the process must be fresh."""
    inputs = make_inputs(arguments)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    versions(arguments.chunk_size)[arguments.memory_of](*inputs).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def fresh_peak_rise(name: str, arguments: argparse.Namespace) -> float:
    """``peak_rise`` in a process of its own."""
    sizes = [f"--{field}={getattr(arguments, field)}" for field in ("tokens", "vocabulary", "width", "threads")]
    command = [sys.executable, __file__, *sizes, f"--chunk-size={arguments.chunk_size}", f"--memory-of={name}"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def median_seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a forward and backward of each version, the versions taking turns."""
    inputs = make_inputs(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in versions(arguments.chunk_size)}
    for repeat in range(arguments.repeats + 1):
        for name, version in versions(arguments.chunk_size).items():
            inputs[0].grad = inputs[1].grad = None
            start = time.perf_counter()
            version(*inputs).backward()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and MiB of every version, and their ratios to the plain version of the same outputs."""
    mib = {name: fresh_peak_rise(name, arguments) for name in versions(arguments.chunk_size)}
    seconds = median_seconds(arguments)  # afterwards: a child's peak starts at the size its parent had

    def row(name: str) -> dict[str, float]:
        base = name.replace("chunked", "plain")
        return {
            "seconds": seconds[name],
            "mib": mib[name],
            "time_ratio": seconds[name] / seconds[base],
            "memory_ratio": mib[name] / mib[base],
            "time_ratio_to_plain": seconds[name] / seconds["plain"],
            "memory_ratio_to_plain": mib[name] / mib["plain"],
        }

    return {name: row(name) for name in seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(peak_rise(arguments))
        return
    results = measure(arguments)
    columns = list(results["plain"])
    print(f"{'':22}" + "".join(f"{column:>23}" for column in columns))
    for name, figures in results.items():
        print(f"{name:22}" + "".join(f"{figures[column]:23.3f}" for column in columns))
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "memory_of")}
        report = {"settings": settings, "torch": torch.__version__, "limits": LIMITS, "versions": results}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
