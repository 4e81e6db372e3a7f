"""Does the turn ratio, or the normalization, keep off-policy training from collapsing?

python -m studies.stability              every cell, three seeds; what has a result already is not run again
python -m studies.stability --quick      the same in minutes, too small to say anything
python -m studies.stability --page       only the page, from the results that are there
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from sorl_lightning.cli import run as sorl
from studies.stability.cells import CELLS
from studies.stability.page import write_page
from studies.stability.run import FULL, QUICK, run

ROOT = Path(__file__).parents[2]
WARM_START = Path("runs/coin_imitation/policy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, one seed, results under runs/")
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/stability"), help="where runs keep their logs")
    arguments = parser.parse_args()
    size, seeds = (QUICK, 1) if arguments.quick else (FULL, arguments.seeds)
    work = arguments.work / ("quick" if arguments.quick else "full") / time.strftime("%Y%m%d-%H%M%S")
    results = arguments.work / "quick_results" if arguments.quick else ROOT / "studies/results/stability"
    page = results / "stability.md" if arguments.quick else ROOT / "docs/results/stability.md"
    if not arguments.page:
        if not WARM_START.exists():
            sorl(["fit", "--config", "sorl:coin_imitation", "--trainer.enable_progress_bar", "false"])
        for seed in range(seeds):  # a seed at a time, so that an unfinished study has all cells
            for cell in CELLS:
                start = time.perf_counter()
                run(cell, seed, size, work, results / f"{cell.name}-{seed}.json")
                print(f"{cell.name} seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    write_page(results, page)
    print(page)


if __name__ == "__main__":
    main()
