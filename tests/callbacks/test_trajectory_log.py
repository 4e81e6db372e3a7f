"""The trajectory log says what was rolled out and what training made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import TrajectoryLog
from sorl_lightning.callbacks.token_records import pieces, turn_record
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.functional.advantages import group_advantages
from sorl_lightning.module import AgentModule
from sorl_lightning.networks import PolicyNetwork
from sorl_lightning.objectives import Distillation, PolicyGradient
from sorl_lightning.teachers import LocalTeacher
from sorl_lightning.trajectory_files import TrajectoryFiles
from sorl_lightning.types import Completion, Turn


def rollouts(**settings: Any) -> RolloutDataModule:
    limits = {"max_turns": 3, "max_tokens": 4, "context_limit": 128, "tasks_per_collection": 2, "group_size": 4}
    return RolloutDataModule(Countdown([3, 2]), ScriptedEngine(), **{**limits, **settings})


def still() -> Any:
    """An optimiser that changes nothing, so that the policy after a fit is the one that was trained."""
    return lambda parameters: torch.optim.SGD(parameters, lr=0.0)


@pytest.fixture
def logged(fit: Any, tmp_path: Path) -> Any:
    def run(module: AgentModule, data: RolloutDataModule, log: TrajectoryLog, **settings: Any) -> list[dict[str, Any]]:
        logger = TensorBoardLogger(tmp_path, name="", version="run")
        callbacks = [log, *settings.pop("callbacks", [])]
        fit(module, data, logger=logger, callbacks=callbacks, **settings)
        return list(TrajectoryFiles(tmp_path / "run/trajectories"))

    return run


def logprobs_of(network: PolicyNetwork, prompt: list[int], completion: list[int]) -> np.ndarray:
    ids = torch.tensor([prompt + completion])
    generated = torch.arange(ids.shape[1])[None] >= len(prompt)
    logprobs, _ = network(ids, torch.arange(ids.shape[1])[None], generated, 1.0)[:2]
    return logprobs[0, len(prompt) :].detach().numpy()


def test_token_figures_are_those_of_training(logged: Any) -> None:
    module = agent(objective=PolicyGradient(ratio="token", kl_coefficient=0.1), optimizer=still())
    data = rollouts()
    lines = logged(module, data, TrajectoryLog(every_n_collections=1, count=None))
    played = {(t.group, t.sibling): t for t in data.collection.trajectories}
    assert [(line["sibling"], line["group"]) for line in lines] == sorted((s, g) for g, s in played)
    rewards = torch.tensor([t.reward for t in played.values()])
    advantages = group_advantages(rewards, torch.tensor([t.group for t in played.values()]))
    expected = dict(zip(played, advantages.tolist(), strict=True))
    for line in lines:
        key = line["group"], line["sibling"]
        trajectory = played[key]
        assert (line["task"], line["reward"], line["success"]) == (
            trajectory.task.id,
            trajectory.reward,
            trajectory.success,
        )
        assert line["ending"] == trajectory.ending.value
        assert line["update"] == 0
        for turn, record in zip(trajectory.turns, line["turns"], strict=True):
            tokens = record["tokens"]
            assert record["prompt_tokens"] == len(turn.prompt_ids)
            assert (record["text"], record["observation"], record["reward"]) == (
                turn.text,
                turn.observation,
                turn.reward,
            )
            assert tuple(tokens["id"]) == turn.completion.token_ids
            assert "".join(tokens["piece"]) == module.tokenizer.decode(turn.completion.token_ids)
            behaviour = np.float32(turn.completion.logprobs)
            assert np.array_equal(np.float32(tokens["logprob"]), behaviour)
            now = logprobs_of(module.policy, list(turn.prompt_ids), tokens["id"])
            np.testing.assert_allclose(tokens["ratio"], np.exp(now - behaviour), rtol=1e-4)
            change = now - behaviour
            np.testing.assert_allclose(tokens["policy_kl"], np.exp(change) - 1 - change, rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(tokens["reference_kl"], 0, atol=1e-5)
            np.testing.assert_allclose(tokens["advantage"], expected[key], rtol=1e-5, atol=1e-6)
            ratio, advantage = np.array(tokens["ratio"]), expected[key]
            clipped = (ratio > 1.2) & (advantage > 0) | (ratio < 0.8) & (advantage < 0)
            assert tokens["clipped"] == clipped.astype(int).tolist()
            assert tokens["mask"] == [1] * len(tokens["id"])
    assert any(sum(turn["tokens"]["clipped"]) for line in lines for turn in line["turns"])


def test_a_distillation_has_its_divergence(logged: Any) -> None:
    module = agent(objective=Distillation(), teacher=LocalTeacher(TINY))
    lines = logged(module, rollouts(), TrajectoryLog(every_n_collections=1, count=1))
    divergence = [value for turn in lines[0]["turns"] for value in turn["tokens"]["divergence"]]
    assert divergence
    assert min(divergence) > -1e-6


def test_figures_are_those_of_the_last_pass(logged: Any) -> None:
    module = agent(objective=PolicyGradient(ratio="token"))
    lines = logged(module, rollouts(passes=2, micro_batches=3), TrajectoryLog(every_n_collections=1))
    assert len(lines) == 4
    assert [line["update"] for line in lines] == [1] * 4


def test_count_and_interval(logged: Any) -> None:
    lines = logged(agent(), rollouts(), TrajectoryLog(every_n_collections=2, count=3), max_epochs=4)
    assert [(line["collection"], line["sibling"], line["group"]) for line in lines] == [
        (c, s, g) for c in (0, 2) for s, g in ((0, 0), (0, 1), (1, 0))
    ]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_has_each_trajectory_once(trainer: Any, tmp_path: Path) -> None:
    def run(name: str, epochs: int, checkpoint: str | None = None) -> TrajectoryFiles:
        saves = ModelCheckpoint(tmp_path / name / "checkpoints", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer(
            logger=TensorBoardLogger(tmp_path, name="", version=name),
            callbacks=[TrajectoryLog(every_n_collections=1, count=None), saves],
            enable_checkpointing=True,
            max_epochs=epochs,
        ).fit(agent(), datamodule=rollouts(), ckpt_path=checkpoint)
        return TrajectoryFiles(tmp_path / name / "trajectories")

    whole = list(run("whole", 4))
    killed = run("killed", 3)
    with killed.paths[-1].open("ab") as file:
        file.write(b'{"collection":3,"gro')
    resumed = list(run("killed", 4, str(tmp_path / "killed/checkpoints/epoch=1.ckpt")))
    keys = [(line["collection"], line["group"], line["sibling"]) for line in resumed]
    assert len(keys) == len(set(keys)) == 4 * 8
    for line in (*whole, *resumed):
        for turn in line["turns"]:
            del turn["seconds"]
    assert resumed == whole


def test_turns_are_printed_where_that_is_asked_for(logged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logged(agent(), rollouts(), TrajectoryLog(shown=1, table=True), enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert "collection 0" in shown
    assert "mean ratio" in shown
    assert "train-" in shown
    assert "turn_limit" in shown or "done" in shown


def test_an_experts_turn_is_not_in_the_loss(tokenizer: Any) -> None:
    said = Completion(token_ids=(300, 301), logprobs=(0.0, 0.0), finish_reason="stop", policy_version=(0, 0))
    turn = Turn(
        index=0, prompt_ids=(1,), completion=said, text="", observation=None, reward=0.0, seconds=0.0, author="expert"
    )
    record = turn_record(turn, {}, tokenizer)
    assert record["author"] == "expert"
    assert record["tokens"]["mask"] == [0, 0]
    assert "ratio" not in record["tokens"]


@pytest.mark.parametrize("text", ["take the coin", "naïve 🪙🪙 é", "", "  two  spaces\n\n", "🧭"])
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    added = pieces(tokenizer, ids)
    assert len(added) == len(ids)
    assert "".join(added) == tokenizer.decode(ids)
    cut = ids[:-1]  # a character may miss its end
    assert "".join(pieces(tokenizer, cut)) == tokenizer.decode(cut)
