"""``python -m studies.turnopd [--quick]``: run what has not been run, then write the page.

Every run leaves one file when it ends; a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

from sorl_lightning.cli import ADVICE
from studies.turnopd import page, world
from studies.turnopd.arms import ARMS, run

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and few collections, to see that it works")
    parser.add_argument("--page", action="store_true", help="only write the page, from what has finished")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--collections", type=int, default=60)
    arguments = parser.parse_args()
    for advice in ADVICE:
        warnings.filterwarnings("ignore", advice)
    name = "turnopd_quick" if arguments.quick else "turnopd"
    results, models = ROOT / "studies/results" / name, ROOT / "runs/studies" / name
    results.mkdir(parents=True, exist_ok=True)
    seeds, collections, tasks = (1, 5, 16) if arguments.quick else (arguments.seeds, arguments.collections, 64)
    target = models / "page.md" if arguments.quick else ROOT / "docs/results/turnopd.md"
    if not arguments.page:
        world.prepare(results, models, 2 if arguments.quick else None, tasks)
        for seed in range(seeds):
            for arm in ARMS:
                path = results / f"{arm}-{seed}.json"
                if not path.exists():
                    figures = run(arm, seed, models, collections, tasks)
                    path.write_text(json.dumps(figures) + "\n")
                    print(
                        arm,
                        seed,
                        f"{page.accuracy(figures):.3f}",
                        f"{page.training_seconds(figures):.0f} s",
                        flush=True,
                    )
    page.write(results, target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
