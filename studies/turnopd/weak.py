"""What becomes of a student who cannot do much yet: ``python -m studies.turnopd.weak``.

It is that of the study after half of its imitation. Vanilla distillation by the reverse KL, at two learning rates, and
by the forward KL, one seed; what has a result is not run again.
"""

from __future__ import annotations

from pathlib import Path

from sorl_lightning.cli import run as sorl
from studies.turnopd import arms, world
from studies.turnopd.__main__ import FULL, ROOT

STUDENT = Path("runs/coin_weak_student/policy")
SETTINGS = {
    "reverse_kl": arms.Setting(student=STUDENT),
    "reverse_kl_smaller_steps": arms.Setting(student=STUDENT, learning_rate=3e-4),
    "forward_kl": arms.Setting(student=STUDENT, divergence="forward_kl"),
}


def main() -> None:
    results = ROOT / "studies/results/turnopd"
    world.prepare_models(results, FULL.tasks)
    if not STUDENT.exists():
        options = {"trainer.max_epochs": 3, "hf_export.folder": STUDENT, "trainer.default_root_dir": STUDENT.parent}
        settings = [f"--{name}={value}" for name, value in options.items()]
        sorl(["fit", "--config", "sorl:coin_student", "--trainer.enable_progress_bar=false", *settings])
    for name, setting in SETTINGS.items():
        path = results / "weak_student" / f"{name}.json"
        if not path.exists():
            arms.keep(arms.run("vanilla", 0, FULL, setting), path)


if __name__ == "__main__":
    main()
