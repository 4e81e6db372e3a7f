"""The controller's replay through real fits: what probes show moves the cap, and nothing else does."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from conftest import agent
from distilling import rollouts, student
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import RolloutDepthController
from sorl_lightning.datamodule import Evaluation
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.functional.depth import DepthState
from sorl_lightning.module import AgentModule
from sorl_lightning.types import TurnStatistics


def at_turn(turn: int, successes: int = 10) -> TurnStatistics:
    """Ten trajectories whose divergence, and whose successes, all lie at ``turn``."""
    here = torch.zeros(turn + 1, dtype=torch.float64)
    here[turn] = 1.0
    ones = torch.ones(turn + 1, dtype=torch.float64)
    return TurnStatistics(
        trajectories=10 * ones, tokens=10 * ones, divergence_sum=here, success_last_turns=successes * here,
        all_last_turns=10 * here,
    )  # fmt: skip


class Scripted(AgentModule):
    """An agent whose statistics are written down beforehand, collection by collection."""

    script: object = None

    @property
    def turn_statistics(self):
        return self.script(self.trainer.current_epoch + 1)


def scripted(script) -> Scripted:
    plain = agent()
    module = Scripted(policy=plain.source, objective=plain.objective, optimizer=plain.optimizer)
    module.script = script
    return module


class Caps(L.Callback):
    """Keeps the depth of each collection, and the controller's average after it."""

    def __init__(self, controller) -> None:
        self.controller = controller
        self.caps: dict[int, int] = {}
        self.smoothed: dict[int, float] = {}
        self.figures: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.caps[trainer.current_epoch + 1] = trainer.datamodule.collection.trajectories[0].turn_limit

    def on_train_epoch_end(self, trainer, pl_module):
        if self.controller.state is not None:
            self.smoothed[trainer.current_epoch + 1] = self.controller.state.smoothed
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def one_task(**settings):
    engine = ScriptedEngine(lambda request: ([request.stop_token_ids[0]], [0.0]))
    limits = {"tasks_per_collection": 1, "group_size": 2, "max_turns": 50, "max_tokens": 1, "context_limit": 256}
    return rollouts(Countdown([1]), engine, **{**limits, **settings})


def test_the_replay_of_the_paper_number_by_number(fit) -> None:
    controller = RolloutDepthController()
    caps = Caps(controller)
    fit(scripted(lambda k: at_turn(8 if k <= 24 else 20)), one_task(), callbacks=[controller, caps], max_epochs=96)
    probes = [k for k in range(1, 97) if caps.caps[k] == 50]
    assert probes == [1, 2, 3, *range(8, 97, 8)]
    assert [caps.smoothed[k] for k in (1, 2, 3)] == pytest.approx([37.4, 28.58, 22.406])
    expected = {4: 23, 9: 19, 17: 16, 25: 14, 33: 16, 41: 18, 65: 20, 89: 21}
    assert {k: caps.caps[k] for k in expected} == expected
    assert caps.figures[2]["depth/probe"] == 1
    assert caps.figures[3]["depth/probe"] == 0
    assert caps.figures[3]["depth/cap"] == 23
    assert controller.history == [caps.caps[k] for k in range(1, 97)]


def test_a_truncated_collection_never_changes_the_controller(fit) -> None:
    """Whatever collections between the probes show, absurd numbers included."""
    runs = []
    for between in (lambda: at_turn(8), lambda: at_turn(49)):
        controller = RolloutDepthController(warmup=1, interval=4)
        caps = Caps(controller)
        script = lambda k, between=between: at_turn(8) if k == 1 or k % 4 == 0 else between()  # noqa: E731
        fit(scripted(script), one_task(), callbacks=[controller, caps], max_epochs=12)
        runs.append((caps.caps, caps.smoothed))
    assert runs[0] == runs[1]


def test_a_probe_that_was_cut_short_is_no_probe(fit) -> None:
    class Cut(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.datamodule.rollout_budget.limit(3)

    controller = RolloutDepthController()
    fit(scripted(lambda k: at_turn(8)), one_task(), callbacks=[controller, Cut()], max_epochs=2)
    assert controller.state is None
    assert controller.history == [3, 3]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_kill_and_resume_at_any_collection_gives_the_caps_of_an_uninterrupted_run(trainer, tmp_path) -> None:
    def run(epochs, resume=None):
        controller = RolloutDepthController(warmup=2, interval=3, min_successes=1, smoothing=0.9)
        saver = L.pytorch.callbacks.ModelCheckpoint(
            tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True, enable_version_counter=False
        )
        data = rollouts(Countdown([6, 5, 4]), max_turns=6, group_size=2, max_tokens=2)
        runner = trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[controller, saver])
        runner.fit(student(), datamodule=data, ckpt_path=resume, weights_only=False)
        return controller

    whole = run(6)
    assert len(set(whole.history)) > 1
    for killed_after in range(1, 6):
        saved = tmp_path / f"epoch={killed_after - 1}.ckpt"
        resumed = run(6, resume=saved)
        assert resumed.history == whole.history
        assert resumed.state == whole.state


def test_its_memory_survives_a_round_trip(fit) -> None:
    controller, other = RolloutDepthController(), RolloutDepthController()
    fit(scripted(lambda k: at_turn(8)), one_task(), callbacks=[controller], max_epochs=4)
    other.load_state_dict(controller.state_dict())
    assert other.state_dict() == controller.state_dict()
    assert set(controller.state_dict()) == {"state", "iteration", "history", "probe_seconds", "seconds_saved"}


def test_validation_runs_at_full_depth(fit) -> None:
    data = rollouts(Countdown([4]), max_turns=4, validation=Evaluation(n=1))
    controller = RolloutDepthController(warmup=0, interval=100, h_min=1)
    controller.state = DepthState(0.0)
    caps = Caps(controller)
    fit(student(), data, callbacks=[controller, caps], limit_val_batches=1)
    assert caps.caps[1] == 1
    assert caps.figures[0]["val/turns"] == 2


def test_probes_are_as_deep_as_h_max_and_without_a_teacher_coverage_decides(fit) -> None:
    controller = RolloutDepthController(h_max=3, min_successes=1, smoothing=1.0, h_min=1, warmup=1, interval=100)
    caps = Caps(controller)
    fit(agent(), rollouts(Countdown([2] * 3), max_turns=4), callbacks=[controller, caps], max_epochs=2)
    assert caps.caps[1] == 3
    assert controller.state.effective == 0
    assert (controller.state.coverage, caps.caps[2]) in ((1, 2), (0, 1))


@pytest.mark.parametrize(
    "settings",
    [{"warmup": -1}, {"interval": 0}, {"quantile": 0.0}, {"smoothing": 1.5}, {"h_min": 0}, {"h_max": 0},
     {"coverage": "some"}, {"fallback_after": 0}, {"cov_slack": -1}, {"min_successes": 0}],
)  # fmt: skip
def test_bad_settings(settings) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        RolloutDepthController(**settings)
