"""How long a command takes before it does something.

    python benchmarks/start_up.py --output start_up.json

``sorl fit --help`` beside the same of a bare LightningCLI, and the quickstart from its command to the end of its first
collection, with a policy of random weights (which plays every episode to its last turn). Each is a process of its own;
CPU seconds are those of the process and its children.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
LightningCLI(BoringModel, BoringDataModule)
"""
SORL = [sys.executable, "-m", "sorl_lightning"]
COMMANDS = {"sorl": [*SORL, "fit", "--help"], "bare": [sys.executable, "-c", BARE, "fit", "--help"]}


def run(command: list[str]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a command that must succeed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_collection() -> tuple[float, float]:
    """Seconds from the quickstart's command until its first collection is written, by the wall and of CPU."""
    with tempfile.TemporaryDirectory() as folder:
        policy = ["--model.policy", "sorl_lightning.models.SmallLlama", "--model.policy.tokenizer", "sorl:textworld"]
        run = ["--trainer.default_root_dir", folder, "--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0"]
        start = time.perf_counter()
        command = [*SORL, "fit", "--config", "sorl:quickstart", *policy, *run]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not any(path.stat().st_size for path in Path(folder).rglob("*.jsonl")):
            if process.poll() is not None:
                assert process.stderr is not None
                raise SystemExit(process.stderr.read().decode()[-2000:])
            time.sleep(0.05)
        wall, ticks = time.perf_counter() - start, os.sysconf("SC_CLK_TCK")
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
        process.wait()
        return wall, sum(map(int, fields[11:15])) / ticks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(options.repeats):
        for name, command in COMMANDS.items():
            spent[name].append(run(command))
    results = {
        name: {kind: statistics.median(values) for kind, values in zip(("wall_s", "cpu_s"), zip(*pairs, strict=True), strict=True)}
        for name, pairs in spent.items()
    }  # fmt: skip
    ratio = results["sorl"]["cpu_s"] / results["bare"]["cpu_s"]
    wall, cpu = first_collection()
    results["first collection"] = {"wall_s": wall, "cpu_s": cpu}
    for name, figures in results.items():
        print(f"{name:17} {figures['wall_s']:6.2f} s, {figures['cpu_s']:6.2f} s of CPU")
    print(f"sorl / bare {ratio:.2f}x")
    if options.output:
        report = {"settings": {"repeats": options.repeats}, "results": results, "ratio_cpu": ratio}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
