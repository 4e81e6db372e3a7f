"""Does TurnOPD reach what vanilla distillation reaches, and in how much of its time?

python -m studies.turnopd              every arm, three seeds; what has a result is not run again
python -m studies.turnopd --quick      the same in minutes, too small to say anything
python -m studies.turnopd --page       only the page, from the results that are there
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from studies.turnopd import page, world
from studies.turnopd.arms import ARMS, Size

ROOT = Path(__file__).parents[2]
FULL = Size(collections=32, evaluations=8, tasks=48)
QUICK = Size(collections=4, evaluations=4, tasks=16)


def run_all(seeds: int, size: Size, workers: int, results: Path) -> list[str]:
    """Run what is missing, so many at once, a seed at a time; the messages of the runs that failed."""

    def attempt(run: tuple[str, int]) -> str | None:
        arm, seed = run
        result = results / f"{arm}-{seed}.json"
        if result.exists():
            return None
        command = [sys.executable, "-m", "studies.turnopd.arms", arm, str(seed), str(result), *size.arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        message = f"{arm}, seed {seed}: {done.stdout.strip()}"
        if done.returncode:
            message += f"ended with {done.returncode}: {done.stderr[-2000:]}"
        print(message, flush=True)
        return message if done.returncode else None

    with ThreadPoolExecutor(workers) as pool:
        runs = [(arm, seed) for seed in range(seeds) for arm in ARMS]
        return [failure for failure in pool.map(attempt, runs) if failure]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few collections, page and results under runs/")
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="runs at once, each a process with one thread")
    arguments = parser.parse_args()
    quick = Path("runs/turnopd_quick")
    results = quick if arguments.quick else ROOT / "studies/results/turnopd"
    target = quick / "page.md" if arguments.quick else ROOT / "docs/results/turnopd.md"
    failures = []
    if not arguments.page:
        results.mkdir(parents=True, exist_ok=True)
        size = QUICK if arguments.quick else FULL
        world.prepare_models(results, size.tasks)
        failures = run_all(1 if arguments.quick else arguments.seeds, size, arguments.workers, results)
    page.write(results, target)
    print(f"wrote {target}")
    if failures:
        sys.exit(f"{len(failures)} runs failed")


if __name__ == "__main__":
    main()
