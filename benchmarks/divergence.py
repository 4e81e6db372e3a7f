"""Time and memory of ``chunked_divergence`` beside F.kl_div on full log-softmaxes, forward and backward.

    python benchmarks/divergence.py --output divergence.json

Memory is the rise of a fresh process's peak resident size over its inputs (the gradients of the student's hidden states
and head count). Time is the median over repeats that alternate between the versions in one process.
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
from torch.nn.functional import kl_div

from sorl_lightning.functional.chunked_divergence import chunked_divergence

LIMITS = {"time": 1.6, "memory": 1 / 8}
Version = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """Sum of the reverse KLs, by way of both models' logits."""
    student = (hidden @ head.T).log_softmax(-1)
    with torch.no_grad():
        teacher = (teacher_hidden @ teacher_head.T).log_softmax(-1)
    return kl_div(teacher, student, log_target=True, reduction="none").sum(-1).sum()


def plain_forward(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """Sum of the forward KLs, likewise."""
    student = (hidden @ head.T).log_softmax(-1)
    with torch.no_grad():
        teacher = (teacher_hidden @ teacher_head.T).log_softmax(-1)
    return kl_div(student, teacher, log_target=True, reduction="none").sum(-1).sum()


def chunked(*inputs: Tensor, kind: str, chunk_size: int) -> Tensor:
    """The same, chunk by chunk."""
    return chunked_divergence(*inputs, kind=kind, chunk_size=chunk_size).sum()  # type: ignore[arg-type]


def versions(chunk_size: int) -> dict[str, Version]:
    """What is compared, by name."""
    return {
        "plain reverse": plain,
        "plain forward": plain_forward,
        "chunked reverse": partial(chunked, kind="reverse_kl", chunk_size=chunk_size),
        "chunked forward": partial(chunked, kind="forward_kl", chunk_size=chunk_size),
    }


def make_inputs(arguments: argparse.Namespace) -> tuple[Tensor, ...]:
    """Random hidden states and heads of student and teacher, allocated and touched."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for trains in (True, False):
        hidden = torch.randn(arguments.tokens, arguments.width, generator=generator)
        head = torch.randn(arguments.vocabulary, arguments.width, generator=generator).mul_(0.05)
        inputs += [hidden.requires_grad_(trains), head.requires_grad_(trains)]
    return tuple(inputs)


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
    """Seconds and MiB of every version, and their ratios to the plain version of the same divergence."""
    mib = {name: fresh_peak_rise(name, arguments) for name in versions(arguments.chunk_size)}
    seconds = median_seconds(arguments)  # afterwards: a child's peak starts at the size its parent had

    def row(name: str) -> dict[str, float]:
        base = name.replace("chunked", "plain")
        return {
            "seconds": seconds[name],
            "mib": mib[name],
            "time_ratio": seconds[name] / seconds[base],
            "memory_ratio": mib[name] / mib[base],
        }

    return {name: row(name) for name in seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(peak_rise(arguments))
        return
    results = measure(arguments)
    columns = list(results["plain reverse"])
    print(f"{'':18}" + "".join(f"{column:>15}" for column in columns))
    for name, figures in results.items():
        print(f"{name:18}" + "".join(f"{figures[column]:15.3f}" for column in columns))
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "memory_of")}
        report = {"settings": settings, "torch": torch.__version__, "limits": LIMITS, "versions": results}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
