"""Keep the figures of the runs of run.sh as JSON files beside this script, and draw their curves.

    python docs/results/search/figures.py runs

Each file has, by tag, [optimiser step, seconds since the run began, value] of every update; a validation alone has a
single row a tag.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from sorl_lightning.report.runs import found_run, read_run

HERE = Path(__file__).parent
FAMILIES = ("train/", "val/", "rollout/", "depth/", "kl_schedule/", "normalization/", "throughput/")
CURVES = (
    ("search_teacher", "train/nll", "imitation, 135 M", "nats a token"),
    ("search_imitation", "train/nll", "imitation, student", "nats a token"),
    ("search_opd", "train/divergence", "TurnOPD, reverse KL", "nats a token"),
    ("so_grpo", "rollout/return", "SO-GRPO, return", "F1 less penalty"),
)
HELD_OUT = {"train/nll": "val/nll", "train/divergence": "val/divergence", "rollout/return": "val/return"}
# Held-out figures that a validation by itself has taken: its folder, and the updates before it.
APART = {
    "search_teacher": (("validate_smollm2_nll", 0), ("validate_teacher_nll", 128)),
    "search_imitation": (("validate_student_start_nll", 0),),
    "search_opd": (("validate_student_kl", 0),),
}
Points = list[tuple[int, float, float]]


def kept(folder: Path) -> dict[str, Points]:
    """The figures of a run, six digits each."""
    found = read_run(found_run(str(folder))[0], folder.name).figures
    return {
        tag: [
            (step, round(seconds, 1), float(f"{value:.6g}"))
            for step, seconds, value in zip(series.steps, series.seconds, series.values, strict=True)
        ]
        for tag, series in sorted(found.items())
        if tag.startswith(FAMILIES)
    }


def collect(runs: Path) -> None:
    """Write a JSON file for each run, a tag a line."""
    for folder in sorted(path for path in runs.iterdir() if (path / "lightning_logs").is_dir()):
        lines = [f"{json.dumps(tag)}: {json.dumps(points)}" for tag, points in kept(folder).items()]
        (HERE / f"{folder.name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def draw() -> None:
    """Draw the curves of the runs that are there: training thin, its mean over eight updates thick, held-out dots."""
    figure, axes = plt.subplots(1, len(CURVES), figsize=(12, 2.9))
    for axis, (name, tag, title, unit) in zip(axes, CURVES, strict=True):
        path = HERE / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        steps, _, values = zip(*found[tag], strict=True)
        smooth = [sum(values[max(0, i - 7) : i + 1]) / len(values[max(0, i - 7) : i + 1]) for i in range(len(values))]
        axis.plot(steps, values, color="C0", alpha=0.3, lw=1)
        axis.plot(steps, smooth, color="C0")
        held_out = [(step + 1, value) for step, _, value in found.get(HELD_OUT[tag], ())]
        for run, step in APART.get(name, ()):
            held_out.append((step, json.loads((HERE / f"{run}.json").read_text())[HELD_OUT[tag]][0][2]))
        if held_out:
            axis.plot(*zip(*held_out, strict=True), "o", color="C1")
        axis.set(title=title, xlabel="updates", ylabel=unit)
        axis.spines[["top", "right"]].set_visible(False)
        if "/nll" in tag:
            axis.set_yscale("log")
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=150)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1]))
    draw()
