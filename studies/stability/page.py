"""The page of the study, made from the files that its runs left."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sorl_lightning.functional.collapse import has_collapsed
from studies.stability.cells import CELLS

Record = dict[str, Any]
PANELS = {"success": "success", "clip_fraction": "clip fraction", "grad_norm": "gradient norm", "bias_norm": "||C||"}
HEAD = """# Stability under off-policy updates

`python -m studies.stability` trains every cell below and writes this page; `--quick` is the same in minutes. A run is one process; its raw
curves are a file of `studies/results/stability/`, with the command that made them. What has a file is not run again.

**Regime.** The coin game from the warm start `configs/coin_imitation.yaml`, eight *fixed* tasks, 8 siblings each, 16 updates a collection (4 mini-batches x 4 passes),
AdamW at learning rate 3e-3, clip range 0.2 (GSPO: its own), gradient norms clipped at 1, no KL: `studies/stability/base.yaml`. It was chosen because a
throwaway prototype collapsed at this learning rate and number of updates with the token ratio; learning rate and clip range were not tuned
for any cell. The smaller step is a third of the learning rate. PPO's critic has a backbone of its own and the same learning rate.

**Collapsed**: success stayed below half of the run's best for the whole last fifth of its collections. **Final success**: mean over the last
fifth of the collections of the training rollouts (64 trajectories each), mean and standard deviation over seeds.
"""


def load(folder: Path) -> dict[str, list[Record]]:
    """Results by cell, each cell's in the order of their seeds."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {cell.name: [record for record in records if record["cell"] == cell.name] for cell in CELLS}


def final(record: Record) -> float:
    """Mean success over the last fifth."""
    success = record["curves"]["success"]
    return statistics.fmean(success[-max(1, len(success) // 5) :])


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation; of a single value the value."""
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def row(name: str, records: Sequence[Record]) -> str:
    """The cell's line of the table."""
    if not records:
        return f"| {name} | 0 | | | | | | |"
    success = [record["curves"]["success"] for record in records]
    collapsed = sum(has_collapsed(curve) for curve in success)
    largest = [max(record["curves"]["bias_norm"]) for record in records if "bias_norm" in record["curves"]]
    clipped = [statistics.fmean(record["curves"]["clip_fraction"]) for record in records]
    cells = (
        name,
        str(len(records)),
        f"{collapsed} of {len(records)}",
        spread([final(record) for record in records]),
        spread([max(curve) for curve in success]),
        f"{statistics.fmean(clipped):.3f}",
        f"{statistics.median(largest):.2f}" if largest else "",
        f"{statistics.fmean([record['cpu_seconds'] for record in records]):.0f}",
    )
    return f"| {' | '.join(cells)} |"


def draw(results: dict[str, list[Record]], path: Path) -> None:
    """Median and every seed of the curves; GRPO and what it is compared with left, PPO right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(PANELS), 2, figsize=(11, 12), sharex=True, sharey="row")
    for column, actor_critic in enumerate((False, True)):
        names = [name for name in results if name.endswith("PPO") == actor_critic]
        for number, name in enumerate(names):
            for panel, tag in zip(axes[:, column], PANELS, strict=True):
                curves = [record["curves"][tag] for record in results[name] if tag in record["curves"]]
                for curve in curves:
                    panel.plot(curve, color=f"C{number}", alpha=0.25, linewidth=0.8)
                if curves:
                    median = [statistics.median(values) for values in zip(*curves, strict=True)]
                    panel.plot(median, color=f"C{number}", label=name)
        for panel, label in zip(axes[:, column], PANELS.values(), strict=True):
            panel.set_ylabel(label)
        if axes[0, column].lines:
            axes[0, column].legend(fontsize=8)
        axes[-1, column].set_xlabel("collection")
    axes[-1, 0].set_yscale("symlog", linthresh=0.1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def discussion(results: dict[str, list[Record]]) -> str:
    """What the table says, counted; and whether it says anything yet."""
    runs = [record for records in results.values() for record in records]
    collapsed = {name: sum(has_collapsed(r["curves"]["success"]) for r in records) for name, records in results.items()}
    fewest = min(len(records) for records in results.values())
    by_ratio = {"token": ("GRPO", "S-GRPO", "PPO", "S-PPO"), "turn": ("Turn-GRPO", "SO-GRPO", "Turn-PPO", "SO-PPO")}
    shares = [
        f"{sum(collapsed[name] for name in names)} of {sum(len(results[name]) for name in names)} with the {ratio} ratio"
        for ratio, names in by_ratio.items()
    ]
    sentences = [f"Collapsed: {' and '.join(shares)}."]
    if not sum(collapsed.values()):
        sentences.append("Nothing collapsed, so the regime says nothing about what prevents a collapse.")
    if fewest < 3:
        sentences.append(
            f"The study is unfinished: {len(runs)} runs, and a cell with {fewest} seeds. With fewer than 3 seeds no two "
            "cells can be told apart."
        )
    sentences.append(
        "With three seeds a cell only large differences mean anything: a share of 3 has a standard error near 0.3, a "
        "collection's success one of 0.06. Clip ranges mean different things at different levels of the ratio, and they were the same here."
    )
    return " ".join(sentences)


def write_page(folder: Path, page: Path) -> None:
    """Write ``page`` and its picture from the results in ``folder``."""
    results = load(folder)
    picture = page.parent / page.stem / "curves.png"
    draw(results, picture)
    total = sum(record["cpu_seconds"] for records in results.values() for record in records)
    head = "| cell | seeds | collapsed | final success | best success | clip fraction | largest &#124;&#124;C&#124;&#124; (median) | CPU s a run |"
    table = [head, "|---|---|---|---|---|---|---|---|", *(row(name, records) for name, records in results.items())]
    parts = [
        HEAD,
        f"## Result\n\n{total / 60:.0f} CPU minutes in all.\n\n" + "\n".join(table),
        f"![Curves]({picture.relative_to(page.parent)})\n\nThick: median of the seeds; thin: every seed.",
        "## What reproduces\n\n" + discussion(results),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")
