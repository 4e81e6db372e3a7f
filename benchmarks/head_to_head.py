"""Time and memory of versions of one computation, side by side: each a function from inputs to a scalar loss.

Memory is the rise of a fresh process's peak resident size over its inputs (gradients count). Time is the median over
repeats that alternate between the versions in one process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LIMITS = {"time": 1.6, "memory": 1 / 8}
Version = Callable[..., Tensor]
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class HeadToHead:
    """One comparison, as a script.

    Args:
        script: the script's own file, run again for each version's memory.
        versions: what is compared, by name, for a chunk size; a "chunked" one is measured against its "plain" twin.
        make_inputs: allocates and touches the inputs.
        sizes: default tokens, vocabulary, width, chunk_size, repeats and threads.
        baseline: a version that all others are measured against besides.
    """

    script: str
    versions: Callable[[int], Mapping[str, Version]]
    make_inputs: Callable[[argparse.Namespace], Sequence[Tensor]]
    sizes: Mapping[str, int]
    baseline: str | None = None

    def main(self, description: str) -> None:
        """Parse the command line, measure, print the table, write the JSON."""
        arguments = self._arguments(description)
        torch.set_num_threads(arguments.threads)
        if arguments.memory_of:
            print(self._peak_rise(arguments))
            return
        results = self._measure(arguments)
        columns = list(next(iter(results.values())))
        print(f"{'':22}" + "".join(f"{column:>23}" for column in columns))
        for name, figures in results.items():
            print(f"{name:22}" + "".join(f"{figures[column]:23.3f}" for column in columns))
        if arguments.output:
            settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "memory_of")}
            report = {"settings": settings, "torch": torch.__version__, "limits": LIMITS, "versions": results}
            arguments.output.write_text(json.dumps(report, indent=2) + "\n")

    def _arguments(self, description: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--output", type=Path, help="where to write the figures, as JSON")
        for name, default in self.sizes.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
        parser.add_argument("--memory-of", help=argparse.SUPPRESS)
        return parser.parse_args()

    def _peak_rise(self, arguments: argparse.Namespace) -> float:
        """MiB by which one forward and backward raises this process's peak; the process must be fresh."""
        inputs = self.make_inputs(arguments)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.versions(arguments.chunk_size)[arguments.memory_of](*inputs).backward()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    def _fresh_peak_rise(self, name: str, arguments: argparse.Namespace) -> float:
        sizes = [f"--{size.replace('_', '-')}={getattr(arguments, size)}" for size in self.sizes]
        command = [sys.executable, self.script, *sizes, f"--memory-of={name}"]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def _median_seconds(self, arguments: argparse.Namespace) -> Figures:
        """Median processor seconds of a forward and backward of each version, the versions taking turns.

        The processor's, of all threads, rather than the clock's: what else runs on the machine hardly matters.
        """
        inputs = self.make_inputs(arguments)
        versions = self.versions(arguments.chunk_size)
        seconds: dict[str, list[float]] = {name: [] for name in versions}
        for repeat in range(arguments.repeats + 1):
            for name, version in versions.items():
                for tensor in inputs:
                    tensor.grad = None
                start = time.process_time()
                version(*inputs).backward()
                if repeat:  # the first round warms up
                    seconds[name].append(time.process_time() - start)
        return {name: statistics.median(taken) for name, taken in seconds.items()}

    def _measure(self, arguments: argparse.Namespace) -> dict[str, Figures]:
        """Processor seconds and MiB of every version, and their ratios to the plain version of the same outputs."""
        mib = {name: self._fresh_peak_rise(name, arguments) for name in self.versions(arguments.chunk_size)}
        seconds = self._median_seconds(arguments)  # afterwards: a child's peak starts at the size its parent had

        def ratios(name: str, base: str, suffix: str = "") -> Figures:
            return {
                f"time_ratio{suffix}": seconds[name] / seconds[base],
                f"memory_ratio{suffix}": mib[name] / mib[base],
            }

        def row(name: str) -> Figures:
            own = {"seconds": seconds[name], "mib": mib[name], **ratios(name, name.replace("chunked", "plain"))}
            return own if self.baseline is None else own | ratios(name, self.baseline, f"_to_{self.baseline}")

        return {name: row(name) for name in seconds}
