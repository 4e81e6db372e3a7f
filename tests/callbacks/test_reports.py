"""What a run leaves behind: folders that load, transcripts that read."""

from __future__ import annotations

import re

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from conftest import agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import HFExport, ScalarLayout, TrajectoryLog
from sorl_lightning.callbacks.scalar_layout import LAYOUT
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.models import Pretrained


def rollouts() -> RolloutDataModule:
    limits = {"max_turns": 3, "max_tokens": 4, "context_limit": 128}
    return RolloutDataModule(Countdown([2]), ScriptedEngine(), tasks_per_collection=1, group_size=2, **limits)


def test_the_export_is_the_trained_policy_and_replaces_an_older_one(fit, tmp_path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "stale.txt").write_text("old")
    module = fit(agent(), rollouts(), callbacks=[HFExport(str(folder))])
    model, tokenizer = Pretrained(path=str(folder)).load()
    for name, parameter in module.policy_model.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter), name
    assert tokenizer.chat_template == module.tokenizer.chat_template
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".policy")] == []


def test_transcripts_appear_every_n_collections(fit, tmp_path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(agent(), rollouts(), callbacks=[TrajectoryLog(every_n_collections=2, count=1)], logger=logger, max_epochs=3)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    texts = events.Tensors("rollout/trajectories/text_summary")
    assert [text.step for text in texts] == [0, 2]
    shown = texts[0].tensor_proto.string_val[0].decode()
    assert "**train-0** reward" in shown
    assert "1 left" in shown


def test_tensorboard_lays_out_the_charts(fit, tmp_path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(agent(), rollouts(), callbacks=[ScalarLayout()], logger=logger, log_every_n_steps=1)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(LAYOUT)
    tags = {tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag}
    written = events.Tags()["scalars"]
    for shown in ("rollout/success", "train/clip_fraction", "throughput/trained_tokens_per_second"):
        assert shown in written
        assert any(re.fullmatch(tag, shown) for tag in tags)
