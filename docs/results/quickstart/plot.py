"""Draw success over collections, and print the table, from the raw files beside this script."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    for path in sorted(HERE.glob("*.json")):
        run = json.loads(path.read_text())
        control = run["learning_rate"] == 0
        color = "0.55" if control else f"C{run['seed']}"
        label = "learning rate 0" if control else f"seed {run['seed']}"
        held_out = run["curves"]["val/success"]
        axes.plot(*zip(*run["curves"]["rollout/success"], strict=True), color=color, alpha=0.25, lw=1)
        axes.plot(*zip(*held_out, strict=True), color=color, marker="o", ms=4, label=label)
        rows = {row["policy"]: row for row in run["rows"]}
        cells = " | ".join(f"{row['success']:.1%}" for row in rows.values())
        print(f"| {label} | {cells} | {run['fit_seconds'] / 60:.1f} |")
    axes.set(xlabel="collections", ylabel="success", ylim=(0, 1))
    axes.set_title("simonsays: held-out tasks (dots), training tasks (thin)", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "success.png", dpi=150)


if __name__ == "__main__":
    main()
