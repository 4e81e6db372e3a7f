"""Does the turn ratio, or the normalization, keep off-policy training from collapsing?

python -m studies.stability                      every regime and cell, three seeds; what has a result is not run again
python -m studies.stability --quick              the same in minutes, too small to say anything
python -m studies.stability --scout simonsays    the grid of a regime, two cells and one seed
python -m studies.stability --page               only the page, from the results that are there
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sorl_lightning.warm_start import prepare
from studies.stability.cells import CELLS, SCOUTED
from studies.stability.page import write_page
from studies.stability.regimes import REGIMES
from studies.stability.run import QUICK, QUICK_OPTIONS, ROOT, Run, execute

QUICK_NOTE = f"**A quick run** of {QUICK} collections with `{' '.join(QUICK_OPTIONS)}`, whatever the regimes say: it shows that the study runs."


def planned(seeds: int, quick: bool) -> list[Run]:
    """Every run, a seed at a time, so that an unfinished study has all cells; the control of many rollouts comes last."""
    return [
        Run(cell=cell, regime=regime, setting=regime.setting, seed=seed, quick=quick)
        for one_pass in (False, True)
        for seed in range(seeds)
        for cell in CELLS
        if cell.one_pass == one_pass
        for regime in REGIMES
    ]


def scouting(name: str) -> list[Run]:
    """The grid of a regime."""
    (regime,) = (regime for regime in REGIMES if regime.name == name)
    return [
        Run(cell=cell, regime=regime, setting=setting, seed=0, scouting=True)
        for setting in regime.grid
        for cell in SCOUTED
    ]


def run_all(runs: list[Run], workers: int, work: Path, results: Path) -> list[str]:
    """Run them, so many at once; the messages of those that failed."""
    regimes = {run.regime.name: run.regime for run in runs}.values()
    missing = [regime for regime in regimes if not Path(regime.folder).exists()]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda regime: prepare(regime.warm_start, regime.folder), missing))

    def attempt(run: Run) -> str | None:
        start = time.perf_counter()
        try:
            done = execute(run, work, results)
        except RuntimeError as error:
            print(error, flush=True)
            return str(error)
        if done:
            print(f"{run}: {time.perf_counter() - start:.0f} s", flush=True)
        return None

    with ThreadPoolExecutor(workers) as pool:
        return [failure for failure in pool.map(attempt, runs) if failure]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a fraction of the size, one seed, page and results under runs/"
    )
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    parser.add_argument("--scout", choices=[regime.name for regime in REGIMES if regime.grid], help="run its grid only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="runs at once, each a process with one thread")
    parser.add_argument("--work", type=Path, default=Path("runs/stability"), help="where runs keep their logs")
    arguments = parser.parse_args()
    work = arguments.work / ("quick" if arguments.quick else "full") / time.strftime("%Y%m%d-%H%M%S")
    results = arguments.work / "quick_results" if arguments.quick else ROOT / "studies/results/stability"
    page = arguments.work / "quick.md" if arguments.quick else ROOT / "docs/results/stability.md"
    failures = []
    if not arguments.page:
        runs = (
            scouting(arguments.scout)
            if arguments.scout
            else planned(1 if arguments.quick else arguments.seeds, arguments.quick)
        )
        failures = run_all(runs, arguments.workers, work, results)
    if not arguments.scout:
        write_page(results, page, QUICK_NOTE if arguments.quick else "")
        print(page)
    if failures:
        sys.exit(f"{len(failures)} runs failed")


if __name__ == "__main__":
    main()
