"""A training step beside TRL's, of GRPO or of distillation: same model, prompts, generated tokens, turns and threads.

    pip install sorl-lightning[bench]
    python benchmarks/trl_step.py --loss grpo --output trl_grpo.json
    python benchmarks/trl_step.py --loss distillation --output trl_distillation.json

The losses are GRPO without a reference, and the reverse KL to a teacher of the student's size. Each side trains in
processes of its own, in turn with the other: the policy of ``scripted_chat`` says as much in every turn, and a tool
answers. Times are medians over steps after a first one; CPU seconds are the process's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS, GROUP = 2, 8


class Clock:
    """Wall clock and CPU seconds of the two parts of each step."""

    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []
        self.tokens: list[dict[str, int]] = []
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, by the wall and of CPU."""
        now = self._now()
        wall, cpu = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return wall, cpu

    def close(self, part: str) -> None:
        """The time since the last lap was spent on "generation", which opens a step, or on its "update"."""
        wall, cpu = self.lap()
        if part == "generation":
            self.parts.append({})
        self.parts[-1] |= {f"{part}_s": wall, f"{part}_cpu_s": cpu}

    def report(self) -> dict[str, float]:
        """Medians over all steps but the first."""
        names = self.parts[0]
        figures = {name: statistics.median(part[name] for part in self.parts[1:]) for name in names}
        tokens = {name: statistics.median(count[name] for count in self.tokens[1:]) for name in self.tokens[0]}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {**figures, **tokens, "peak_MiB": peak}


def run_trl(folder: str, options: argparse.Namespace) -> dict[str, float]:
    """TRL's trainer with its loop over tools, on transformers' generate, which it offers where there is no GPU."""
    import torch
    from datasets import Dataset
    from scripted_chat import QUESTIONS, look
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    clock, size = Clock(), PROMPTS * GROUP
    base: Any = GRPOTrainer if options.loss == "grpo" else DistillationTrainer

    class Timed(base):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            clock.lap()
            found = super()._generate_and_score_completions(inputs)
            clock.close("generation")
            mask = found["completion_mask"] * found.get("tool_mask", 1)
            tokens = int(found["prompt_mask"].sum() + found["completion_mask"].sum())
            clock.tokens.append({"trained_tokens": int(mask.sum()), "row_tokens": tokens})
            return found

    class Laps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.close("update")

    settings: dict[str, Any] = {
        "output_dir": folder + "/trl",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1000,
        "learning_rate": 1e-9,
        "max_steps": options.steps + 1,
        "per_device_train_batch_size": size,
        "max_completion_length": options.turns * (options.words + 120),
        "max_tool_calling_iterations": options.turns - 1,
        "temperature": 1.0,
        "shuffle_dataset": False,
    }
    common = {
        "model": folder,
        "train_dataset": Dataset.from_list(
            [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS * GROUP]
        ),
        "tools": [look],
        "callbacks": [Laps()],
    }
    if options.loss == "grpo":
        args = GRPOConfig(**settings, num_generations=GROUP, steps_per_generation=1, beta=0.0)

        def reward(completions: Sequence[Any], **_: Any) -> list[float]:
            return [float(place % 2) for place in range(len(completions))]

        Timed(args=args, reward_funcs=reward, **common).train()
    else:
        Timed(args=DistillationConfig(**settings, beta=1.0), teacher_model=folder, **common).train()
    return clock.report()


def run_sorl(folder: str, options: argparse.Namespace) -> dict[str, float]:
    """This package's, with the engine in its own process."""
    import lightning as L
    import torch
    from scripted_chat import QUESTIONS, look
    from transformers import AutoTokenizer

    from sorl_lightning.datamodule import RolloutDataModule
    from sorl_lightning.models import Pretrained
    from sorl_lightning.module import AgentModule
    from sorl_lightning.objectives import Distillation, PolicyGradient
    from sorl_lightning.rollout.chat import ChatFormat
    from sorl_lightning.rollout.engines import LocalEngine
    from sorl_lightning.rollout.environment import Environment, Step
    from sorl_lightning.teachers import LocalTeacher
    from sorl_lightning.types import Message, Task

    torch.set_num_threads(1)
    clock = Clock()
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tools=[look], tokenize=False)
    system = rendered.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]
    openings = [(Message(role="system", content=system), Message(role="user", content=q)) for q in QUESTIONS]

    class House(Environment):
        """An episode."""

        def tasks(self, split: str) -> Sequence[Task]:
            return [Task(id=f"{split}{number}", prompt=opening) for number, opening in enumerate(openings)]

        def reset(self, task: Task) -> Sequence[Message]:
            return ()

        def step(self, text: str) -> Step:
            return Step(look(), 0.0, False)

    class Laps(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            clock.close("generation")
            rows = [len(t.turns[-1].prompt_ids) + len(t.turns[-1].completion.token_ids) for t in data.collection.sound]
            clock.tokens.append({"trained_tokens": int(batch.generated.sum()), "row_tokens": sum(rows)})

        def on_train_batch_end(self, *_: Any) -> None:
            clock.close("update")

    data = RolloutDataModule(
        environment=House(),
        engine=LocalEngine(),
        chat=ChatFormat(observation_role="tool"),
        tasks_per_collection=PROMPTS,
        group_size=GROUP,
        max_turns=options.turns,
        max_tokens=options.words + 2,
        reward=lambda trajectory: float(trajectory.sibling % 2),
    )
    module = AgentModule(
        policy=Pretrained(path=folder),
        objective=PolicyGradient(ratio="token") if options.loss == "grpo" else Distillation(),
        teacher=None if options.loss == "grpo" else LocalTeacher(folder),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-9),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=options.steps + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[Laps()],
        default_root_dir=folder,
        gradient_clip_val=1.0,
    )
    if options.profile is None:
        trainer.fit(module, datamodule=data)
    else:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the engine has one of its own
        with torch.profiler.profile(experimental_config=everywhere) as profiler:
            trainer.fit(module, datamodule=data)
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=48)
        options.profile.write_text(table)
    return clock.report()


SIDES = {"trl": run_trl, "sorl": run_sorl}


def measure(side: str, folder: str, turns: int, options: argparse.Namespace) -> dict[str, float]:
    """One side's figures, from a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", folder, "--turns", str(turns)]
    command += ["--steps", str(options.steps), "--words", str(options.words), "--loss", options.loss]
    quiet = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    found = _run(command, quiet)
    if options.profile and side == "sorl" and turns == options.turns[-1]:
        _run([*command, "--profile", str(options.profile)], quiet)  # apart: it takes time and memory
    return found


def _run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: str, turns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides at one number of turns."""
    found = {side: measure(side, folder, turns, options) for side in SIDES}
    for figures in found.values():
        figures["step_s"] = figures["generation_s"] + figures["update_s"]
        figures["step_cpu_s"] = figures["generation_cpu_s"] + figures["update_cpu_s"]
        for part, tokens in (
            ("generation", "trained_tokens"),
            ("update", "trained_tokens"),
            ("step", "trained_tokens"),
        ):
            figures[f"{part}_tokens_per_cpu_s"] = figures[tokens] / figures[f"{part}_cpu_s"]
    theirs, ours = found["trl"], found["sorl"]
    names = ("step_s", "step_cpu_s", "generation_cpu_s", "update_cpu_s", "peak_MiB")
    return {"turns": turns, **found, "trl/sorl": {name: theirs[name] / ours[name] for name in names}}


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=("grpo", "distillation"), default="grpo")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--words", type=int, default=24, help="generated tokens of a turn")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; one more comes before them")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv_heads", type=int, default=1, help="of width 64; queries have hidden / 64 heads")
    parser.add_argument("--vocabulary", type=int, default=8192, help="at the default the share of Qwen2.5-0.5B's")
    parser.add_argument("--profile", type=Path, help="where time goes on this package's side, at the last of --turns")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        (options.turns,) = options.turns
        print(json.dumps(SIDES[options.side](options.folder, options)))
        return
    import torch
    import transformers
    import trl
    from scripted_chat import build
    from trl.chat_template_utils import qwen2_5_chat_template

    results = []
    with tempfile.TemporaryDirectory() as folder:
        build(
            Path(folder),
            qwen2_5_chat_template,
            options.words,
            options.hidden,
            options.layers,
            options.vocabulary,
            options.kv_heads,
        )
        print(f"{'turns':>5} {'side':>5} {'step s':>8} {'CPU s':>8} {'gen.':>8} {'update':>8} {'tokens':>8} {'MiB':>6}")
        for turns in options.turns:
            results.append(compare(folder, turns, options))
            for side in SIDES:
                f = results[-1][side]
                print(
                    f"{turns:5} {side:>5} {f['step_s']:8.2f} {f['step_cpu_s']:8.2f} {f['generation_cpu_s']:8.2f} "
                    f"{f['update_cpu_s']:8.2f} {f['trained_tokens']:8.0f} {f['peak_MiB']:6.0f}"
                )
            ratios = ", ".join(f"{name} {value:.2f}" for name, value in results[-1]["trl/sorl"].items())
            print(f"{'':11} trl/sorl: {ratios}", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    settings = {
        key: value for key, value in vars(options).items() if key not in ("output", "profile", "side", "folder")
    }
    report = {"settings": settings, "versions": versions, "machine": platform.machine(), "results": results}
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
