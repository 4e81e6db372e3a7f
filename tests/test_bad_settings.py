"""Settings that cannot work: one sentence that names the field, and no rollout."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sorl_lightning.cli import main
from sorl_lightning.rollout.player import Player

BASE: dict[str, Any] = {
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "logger": False,
                "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": "runs"},
    "model": {
        "policy": {"class_path": "sorl_lightning.models.SmallLlama",
                   "init_args": {"tokenizer": "sorl:textworld", "hidden_size": 32, "num_hidden_layers": 1}},
        "objective": {"class_path": "sorl_lightning.objectives.PolicyGradient", "init_args": {}},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
    },
    "data": {"environment": {"class_path": "doubles.Countdown", "init_args": {}}, "tasks_per_collection": 2,
             "group_size": 2, "max_turns": 2, "max_tokens": 4, "context_limit": 64, "micro_batches": 1},
    "trajectory_log": {}, "checkpoint": {}, "best_checkpoint": {},
}  # fmt: skip
POLICY, OBJECTIVE, OPTIMIZER = (f"model.{name}.init_args" for name in ("policy", "objective", "optimizer"))

COUNTS = [
    *(f"data.{name}" for name in ("tasks_per_collection", "group_size", "max_turns", "max_tokens", "context_limit",
                                  "mini_batches", "passes", "micro_batches", "token_budget")),
    "data.validation.n", "data.validation.max_tasks", f"{POLICY}.hidden_size", f"{POLICY}.num_hidden_layers",
    f"{POLICY}.context_length", "trainer.num_nodes", "trainer.max_steps", "trainer.check_val_every_n_epoch",
    "trainer.devices", "trajectory_log.every_n_collections", "trainer.log_every_n_steps",
]  # fmt: skip
POSITIVE = [
    "data.temperature",
    f"{OBJECTIVE}.epsilon_low",
    f"{OBJECTIVE}.epsilon_high",
    "trainer.gradient_clip_val",
    "trajectory_log.max_megabytes",
]
NOT_NEGATIVE = [
    "data.retries", "data.max_staleness", "data.validation.temperature", f"{OBJECTIVE}.kl_coefficient",
    f"{OBJECTIVE}.entropy_coefficient",
    f"{OPTIMIZER}.lr", f"{OPTIMIZER}.weight_decay", "model.max_skipped_steps", "trainer.limit_val_batches",
    "trajectory_log.count", "trajectory_log.shown",
]  # fmt: skip
CHOICES = [
    "data.aggregation", f"{OBJECTIVE}.ratio", f"{OBJECTIVE}.advantage", f"{OBJECTIVE}.kl_estimator",
    f"{POLICY}.head_dim", "trainer.accelerator", "trainer.precision", "trainer.strategy",
    "trainer.gradient_clip_algorithm", "best_checkpoint.mode", "checkpoint.mode",
]  # fmt: skip
CLASSES = ["model.policy", "model.objective", "model.optimizer", "data.environment", "data.engine"]
WORDS = ["", "yes please", "3 apples", "[]", "{}", "null and void", "1e", "--", "🪙"]

TEXTWORLD = "sorl_lightning.rollout.environments.TextWorldExpress"


def with_callback(name: str, **arguments: Any) -> dict[str, Any]:
    switch = {"class_path": f"sorl_lightning.callbacks.{name}", "init_args": arguments}
    return {"trainer.callbacks": [switch]}


def with_part(key: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {key: {"class_path": f"sorl_lightning.{path}", "init_args": arguments}}


# Settings of parts that the base has not.
PARTS: list[tuple[str, dict[str, Any]]] = [
    *((name, with_part("data.environment", "rollout.environments.TextWorldExpress", **{name: value}))
      for name, value in (("train_tasks", -7), ("test_tasks", -1), ("min_gold", -7), ("max_steps", 0),
                          ("game", "chess"),
                          ("skip_seeds", -1), ("reward", "much"), ("split_by", "luck"))),
    *((name, with_part("data.engine", "rollout.engines.LocalEngine", **{name: value}))
      for name, value in (("device", "zzz!"), ("max_batch", 0), ("dtype", "float9"), ("batching", "both"))),
    *((name, with_callback("RolloutDepthController", **{name: value}))
      for name, value in (("quantile", 1.5), ("smoothing", 0.0), ("interval", 0), ("coverage", "some"))),
    ("every_n_collections", with_callback("TurnDiagnosis", every_n_collections=-7)),
    ("start", with_callback("KLScheduleTransition", start=2.0)),
    ("tolerance", with_callback("ClippingMonitor", tolerance=-1.0)),
    ("rule", with_callback("ClippingTriggeredNormalization", rule="max9")),
    ("depth", with_callback("FixedDepth", depth=0)),
    ("share", with_callback("TOPD", share=float("nan"))),
    ("kappa", with_callback("TurnDecay", kappa=-0.5)),
    ("timeout_minutes", with_part("trainer.strategy", "strategies.FSDP2", timeout_minutes=0)),
    ("compute_dtype", with_part("trainer.strategy", "strategies.FSDP2", compute_dtype="float8")),
    ("max_time", {"trainer.max_time": "a while"}),
    *(("monitor", {f"{name}.monitor": figure}) for name in ("checkpoint", "best_checkpoint")
      for figure in ("sucess", "val/sucess", "/")),
]  # fmt: skip

# Each is valid by itself, and impossible together.
PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("group_size", {"data.group_size": 1}),
    ("mini_batches", {"data.mini_batches": 5}),
    ("context_limit", {"data.context_limit": 100_000}),
    ("context_limit", {"data.context_limit": 3}),
    ("hidden_size", {f"{POLICY}.hidden_size": 33}),
    ("limit_train_batches", {"trainer.limit_train_batches": 1}),
    ("overfit_batches", {"trainer.overfit_batches": 1}),
    ("fast_dev_run", {"trainer.fast_dev_run": 1}),
    ("val_check_interval", {"trainer.val_check_interval": 2}),
    ("reload_dataloaders", {"trainer.reload_dataloaders_every_n_epochs": 1}),
    ("max_staleness", {"data.max_staleness": 1, "data.resample": 1}),
    ("strategy", {"trainer.strategy": "fsdp"}),
    ("strategy", {"trainer.strategy": "fsdp_cpu_offload"}),
    ("strategy", {"trainer.strategy": "deepspeed"}),
    ("devices", {"trainer.accelerator": "gpu", "trainer.devices": 64}),
    ("ckpt_path", {"ckpt_path": "nowhere.ckpt"}),
    ("ckpt_path", {"ckpt_path": "bad.yaml"}),
    ("token_budget", {"data.token_budget": 63}),
    ("token_budget", {"data.token_budget": 64, "data.tasks_per_collection": 99}),
    ("data.temperature", {"model.temperature": 0.5}),
    ("model.temperature", {"model.temperature": 1.0, "data.temperature": 0.5}),
    ("data.micro_batches", {"trainer.accumulate_grad_batches": 4}),
    ("critic", {f"{OBJECTIVE}.advantage": "gae"}),
    ("model.critic", with_part("model.critic", "critic.Critic")),
    ("teacher", with_part("model.objective", "objectives.Distillation")),
    ("group_size", with_part("model.objective", "objectives.Imitation")),
    ("ATODAnnealing", with_callback("ATODAnnealing")),
    ("KLScheduleTransition", {"trainer.max_epochs": -1, **with_callback("KLScheduleTransition")}),
    ("tokenizer", {f"{POLICY}.tokenizer": "nowhere/at/all"}),
    ("policy", {"model.policy": "nowhere/at/all"}),
    ("tasks", {"data.environment.init_args.turns": []}),
]


def bad_settings(count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """A word that the message must have, and the settings."""
    draw = random.Random(seed)
    yield from PAIRS
    yield from PARTS
    for _ in range(count):
        kind = draw.choice(("count", "positive", "not negative", "choice", "type", "class", "key", "nan"))
        if kind == "count":
            key, value = draw.choice(COUNTS), draw.choice((0, -2, -draw.randrange(3, 99)))
            value = -2 if key in ("trainer.log_every_n_steps", "trainer.max_steps") else value
        elif kind == "positive":
            key, value = draw.choice(POSITIVE), draw.choice((0.0, -draw.random(), -1e9))
        elif kind == "not negative":
            key, value = draw.choice(NOT_NEGATIVE), -draw.randrange(1, 99)
        elif kind == "choice":
            key, value = draw.choice(CHOICES), draw.choice(("none of these", "GRPO!", "zzz"))
        elif kind == "type":
            key, value = draw.choice([*COUNTS, *POSITIVE]), draw.choice(WORDS)
        elif kind == "class":
            key, value = draw.choice(CLASSES), {"class_path": draw.choice(("no.such.Thing", "torch.nn.Nothing", "x"))}
        elif kind == "nan":
            key = draw.choice([*POSITIVE, "data.validation.temperature", f"{OBJECTIVE}.kl_coefficient"])
            value = draw.choice((float("nan"), float("inf"), float("-inf")))
        else:
            known = draw.choice([*COUNTS, *POSITIVE, *CHOICES])
            section, _, name = known.rpartition(".")
            key, value = f"{section}.{misspelt(name, draw)}", 1
        name = key.rpartition(".")[2]
        yield "learning rate" if name == "lr" and kind == "not negative" else name, {key: value}


def misspelt(name: str, draw: random.Random) -> str:
    at = draw.randrange(1, len(name) + 1)
    return name[:at] + draw.choice("qxz") + name[at:]


def edited(settings: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    for key, value in settings.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config


class RolloutStarted(Exception):
    """Raised in the place of a rollout."""


def told(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path) -> str:
    """What the user reads."""

    def trip(*_: object, **__: object) -> None:
        raise RolloutStarted

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Player, "_turn", trip)
    Path("bad.yaml").write_text(yaml.safe_dump(edited(settings)))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "bad.yaml"])
    assert stop.value.code not in (0, None)
    return f"{stop.value.code}\n{capsys.readouterr().err}"


def test_the_settings_that_are_made_worse_start_a_rollout(monkeypatch, capsys, tmp_path) -> None:
    with pytest.raises(RolloutStarted):
        told({}, monkeypatch, capsys, tmp_path)


ALL = list(bad_settings(200))
SAMPLE = [*PAIRS, *ALL[len(PAIRS) :: 12]]
refused: list[str] = []


def check(field: str, settings: dict[str, Any], monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    text = told(settings, monkeypatch, capsys, tmp_path)
    assert field in text, text
    assert "Traceback" not in text
    assert text.startswith("sorl: ")
    assert len(str(text).splitlines()[0]) > 20


def label(case: Any) -> str:
    return str(case)[:60]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("field", "settings"), SAMPLE, ids=label)
def test_bad_settings_are_refused_in_a_sentence(field, settings, monkeypatch, capsys, tmp_path) -> None:
    check(field, settings, monkeypatch, capsys, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("field", "settings"), ALL, ids=label)
def test_two_hundred_bad_settings(field, settings, monkeypatch, capsys, tmp_path) -> None:
    check(field, settings, monkeypatch, capsys, tmp_path)
    refused.append(field)


@pytest.mark.slow
def test_they_were_as_many_as_that(capsys) -> None:
    assert len(refused) == len(ALL) > 200
    with capsys.disabled():
        fields = len(set(refused))
        sys.stdout.write(f"\n{len(refused)} bad configurations refused in a sentence: no rollout, {fields} fields\n")
