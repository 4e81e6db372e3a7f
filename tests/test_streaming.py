"""Generation while training, through a real fit: staleness, carry-over, and exact books over failures and resumes."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from functools import partial
from typing import ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from conftest import TINY, agent, serving
from doubles import Countdown, ScriptedEngine
from served import CONTEXT, Served, tiny
from sorl_lightning.callbacks import GuidedOPD, RolloutDepthController
from sorl_lightning.datamodule import Evaluation, RolloutDataModule
from sorl_lightning.errors import ConfigurationError, EngineOutage, RolloutError
from sorl_lightning.objectives import Distillation, Mismatch, PolicyGradient
from sorl_lightning.rollout.engines import LocalEngine, VLLMEngine
from sorl_lightning.teachers import LocalTeacher
from sorl_lightning.testing.fake_vllm import FakeVLLM

EPOCHS = 5
SIZE = 4
TURNS = (3, 1, 4, 2, 2, 3, 1)


class Slow(ScriptedEngine):
    """Takes its time, longer for some; how long depends on the request alone."""

    def __init__(self, delay: float = 0.002) -> None:
        super().__init__(delay=delay)

    async def generate(self, request):
        if request.trajectory.task % 5 == 0:
            await asyncio.sleep(10 * self.delay)
        return await super().generate(request)


def streaming(environment=None, engine=None, **settings) -> RolloutDataModule:
    defaults = {"tasks_per_collection": SIZE, "group_size": 2, "max_turns": 4, "max_tokens": 4, "context_limit": 128,
                "max_staleness": 1}  # fmt: skip
    return RolloutDataModule(environment or Countdown(TURNS), engine or Slow(), **{**defaults, **settings})


class Trained(L.Callback):
    """Remembers what each collection trained, and its figures."""

    def __init__(self) -> None:
        self.collections: list = []
        self.figures: list[dict] = []
        self.stalenesses: list[set[int]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.stalenesses.append(set((pl_module.policy_version - batch.policy_version)[batch.generated].tolist()))

    def on_train_epoch_end(self, trainer, pl_module):
        self.collections.append(trainer.datamodule.collection)
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    @property
    def uids(self) -> Counter:
        return Counter((t.group, t.task.id, t.sibling) for c in self.collections for t in c.trajectories)


def drawn(data: RolloutDataModule, epochs: int = EPOCHS) -> Counter:
    """What a run without streaming trains: every draw once, all siblings."""
    tasks = [task for index in range(epochs) for task in data.tasks_of_collection(index)]
    return Counter((n, task.id, sibling) for n, task in enumerate(tasks) for sibling in range(data.group_size))


@pytest.mark.parametrize("engine", [Slow, LocalEngine, partial(LocalEngine, batching="continuous")])
@pytest.mark.parametrize("staleness", [1, 2])
def test_every_draw_is_trained_once_within_the_bound(fit, staleness, engine) -> None:
    trained = Trained()
    data = streaming(engine=engine(), max_staleness=staleness, mini_batches=2)
    fit(agent(), data, callbacks=[trained], max_epochs=EPOCHS)
    assert trained.uids == drawn(data)
    assert [len(c.trajectories) for c in trained.collections] == [SIZE * 2] * EPOCHS
    assert [c.index for c in trained.collections] == list(range(EPOCHS))
    # Two updates a collection: so many versions old is a token of weights that are so many collections old.
    for update, ages in enumerate(trained.stalenesses):
        assert ages <= {2 * collections + update % 2 for collections in range(staleness + 1)}
    assert any(age > 1 for ages in trained.stalenesses for age in ages)
    for collection, figures in zip(trained.collections, trained.figures, strict=True):
        assert all(collection.index - staleness <= t.started <= collection.index for t in collection.trajectories)
        assert figures["rollout/staleness"] <= figures["rollout/staleness_max"] <= staleness
        left = min(staleness, EPOCHS - 1 - collection.index) * SIZE
        assert figures["rollout/outstanding_groups"] == left >= figures["rollout/carried_groups"]
        assert figures["rollout/restarted_groups"] == 0
    assert trained.figures[-1]["rollout/outstanding_groups"] == 0
    assert data.engine is not None
    assert all(figures["rollout/wait_seconds"] <= figures["rollout/seconds"] for figures in trained.figures)


def test_at_staleness_1_a_collection_is_what_started_a_collection_before(fit) -> None:
    trained = Trained()
    fit(agent(), streaming(), callbacks=[trained], max_epochs=4)
    for collection in trained.collections[1:]:
        assert {t.started for t in collection.trajectories} == {collection.index - 1}
        assert collection.stream.staleness_max == 1
    first = trained.collections[0]
    assert {t.started for t in first.trajectories} == {0}
    assert first.stream.staleness_max == 0


def test_staleness_0_has_no_background(fit) -> None:
    data = streaming(engine=ScriptedEngine(), max_staleness=0)
    fit(agent(), data)
    assert data.state_dict() == {"max_turns": 4}
    assert data.collection.stream is None


class Remembered(L.Callback):
    """Scores every token by the weights of the version that it says it is of."""

    def __init__(self) -> None:
        self.policies: dict = {}
        self.difference = 0.0
        self.confused = 0.0  # with the version before
        self.mixed = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.policies[pl_module.policy_version] = copy.deepcopy(pl_module.policy)
        known = batch.policy_version.unique().tolist()
        for version in known:
            if version < 0:
                continue
            own = batch.policy_version == version
            self.difference = max(self.difference, self.largest(batch, own, version, pl_module.temperature))
            if version > 0:
                self.confused = max(self.confused, self.largest(batch, own, version - 1, pl_module.temperature))
        versions = [row[row >= 0].unique().numel() for row in batch.policy_version]
        self.mixed += sum(number > 1 for number in versions)

    @torch.no_grad()
    def largest(self, batch, tokens, version, temperature) -> float:
        logprobs, _ = self.policies[version](batch.input_ids, batch.position_ids, batch.generated, temperature)
        return float((logprobs - batch.behaviour_logprobs)[tokens].abs().max())


@pytest.mark.parametrize("batching", ["rounds", "continuous"])
def test_each_token_is_of_the_version_that_it_says(fit, batching) -> None:
    remembered = Remembered()
    module = agent(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=5.0))
    fit(module, streaming(engine=LocalEngine(batching=batching)), callbacks=[remembered], max_epochs=3)
    assert 0 < remembered.difference < 1e-4
    first, last = remembered.policies[0], module.policy
    assert (
        max(float((p - q).detach().abs().max()) for p, q in zip(first.parameters(), last.parameters(), strict=True))
        > 1e-2
    )


class Waiting(VLLMEngine):
    """Every other group plays its second turn under new weights only."""

    turns: ClassVar[Counter] = Counter()

    async def generate(self, request):
        self.turns[request.trajectory] += 1
        while self.turns[request.trajectory] == 2 and request.trajectory.task % 2 and not self._version:
            await asyncio.sleep(0.005)
        return await super().generate(request)


@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_servers_generate_while_training_and_trajectories_live_through_new_weights(fit, tokenizer, in_flight) -> None:
    class Source:
        def load(self):
            return tiny(True), tokenizer

    remembered, trained = Remembered(), Trained()
    Waiting.turns.clear()
    with FakeVLLM(tiny(True), CONTEXT) as fake:
        engine = Waiting([fake.url], in_flight=in_flight, probe_every=1, probe_tolerance=1e-4)
        data = streaming(engine=engine)
        fit(agent(policy=Source()), data, callbacks=[remembered, trained], max_epochs=3)
    assert trained.uids == drawn(data, 3)
    assert remembered.difference < 1e-4
    assert remembered.mixed
    assert trained.figures[-1]["rollout/staleness"] == 1.0


class Alive(VLLMEngine):
    """Says when a turn has been asked for."""

    asked: ClassVar[threading.Event] = threading.Event()

    async def generate(self, request):
        turn = asyncio.ensure_future(super().generate(request))
        await asyncio.sleep(0.05)  # until it has reached the server
        self.asked.set()
        return await turn


class MidTurn(L.Callback):
    """Ends a collection, after which weights are pushed, when a turn has just begun."""

    def on_train_epoch_end(self, trainer, pl_module):
        Alive.asked.clear()
        Alive.asked.wait(10.0)  # at the end of the run there is none to come


@serving("disk", real=True)
@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_turns_in_flight_live_through_pushes_to_a_real_server(fit, tokenizer, server: Served, in_flight) -> None:
    """Kept, a turn goes on under new weights, token by token; waited for, it ends under the old ones."""

    class Source:
        def load(self):
            return server.policy(), tokenizer

    remembered, trained = Remembered(), Trained()
    engine = Alive([server.url], in_flight=in_flight, probe_every=1, probe_tolerance=5e-5)
    data = streaming(engine=engine, max_tokens=48, context_limit=CONTEXT)
    module = agent(policy=Source(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    fit(module, data, callbacks=[remembered, trained, MidTurn()], max_epochs=4)
    assert trained.uids == drawn(data, 4)
    assert 0 < remembered.difference <= 5e-5
    assert remembered.confused > 1e-2  # the version matters
    turns = [turn.completion.policy_version for c in trained.collections for t in c.trajectories for turn in t.turns]
    assert all(list(versions) == sorted(versions) for versions in turns)
    assert any(len(set(versions)) > 1 for versions in turns) == (in_flight == "keep")
    assert trained.figures[-1]["rollout/staleness"] == 1.0


def test_a_teacher_plays_on_in_groups_that_started_with_it(fit) -> None:
    trained = Trained()
    module = agent(objective=Distillation(), teacher=LocalTeacher(TINY))
    data = streaming(engine=LocalEngine(), max_staleness=2)
    fit(module, data, callbacks=[trained, GuidedOPD(end=0.7)], max_epochs=EPOCHS)
    assert trained.uids == drawn(data)
    authors = [Counter(turn.author for t in c.trajectories for turn in t.turns) for c in trained.collections]
    assert authors[0]["policy"] == 0  # at probability 1
    assert authors[1]["teacher"] > 0
    assert all(c.stream.staleness_max <= 2 for c in trained.collections)


def test_a_cap_binds_the_groups_that_start_next(fit) -> None:
    class Cap(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.datamodule.rollout_budget.limit(4 - trainer.current_epoch % 2)

    trained = Trained()
    fit(agent(), streaming(), callbacks=[trained, Cap()], max_epochs=EPOCHS)
    for collection in trained.collections:
        assert {t.turn_limit for t in collection.trajectories} == {
            4 - start % 2 for start in {t.started for t in collection.trajectories}
        }
    assert {t.turn_limit for c in trained.collections for t in c.trajectories} == {3, 4}


def test_the_depth_controller_looks_at_probes_when_they_are_trained(fit) -> None:
    controller = RolloutDepthController(warmup=1, interval=2, min_successes=1, h_min=1)
    probed = []

    class Seen(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            probed.append(bool(trainer.callback_metrics["depth/probe"]))

    trained = Trained()
    fit(agent(), streaming(), callbacks=[controller, trained, Seen()], max_epochs=5)
    # Started at the starts of collections 0 (probe), 0, 1 (probe), 2 and 3 (probe).
    assert probed == [True, True, True, False, True]
    with pytest.raises(ConfigurationError, match="max_staleness"):
        fit(agent(), streaming(max_staleness=2), callbacks=[RolloutDepthController()])


@pytest.mark.parametrize("own", [True, False])
def test_validation_goes_on_beside_the_groups_in_the_making(fit, own) -> None:
    results = []
    for staleness in (0, 1):
        trained = Trained()
        engine = LocalEngine()
        validation = Evaluation(n=2, engine=LocalEngine() if own else None)
        data = streaming(engine=engine, max_staleness=staleness, validation=validation)
        module = agent(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        fit(module, data, callbacks=[trained], max_epochs=3, limit_val_batches=1)
        assert trained.uids.total() == 3 * SIZE * 2
        results.append([figures["val/tokens"] for figures in trained.figures])
    assert results[0] == results[1]  # the same seeds and weights: the same held-out tokens


def test_a_lost_engine_comes_back_and_nothing_is_trained_twice(fit, caplog) -> None:
    class Failing(Slow):
        lost = 0

        async def generate(self, request):
            if len(self.requests) in (30, 60):
                self.lost += 1
                self.requests.append(request)
                raise EngineOutage("the server has gone")
            return await super().generate(request)

    trained, engine = Trained(), Failing()
    data = streaming(engine=engine, max_staleness=2)
    fit(agent(), data, callbacks=[trained], max_epochs=EPOCHS)
    assert engine.lost == 2
    assert trained.uids == drawn(data)
    assert sum(figures["rollout/restarted_groups"] for figures in trained.figures) > 0
    assert "the server has gone" in caplog.text


def test_an_engine_that_stays_away_ends_the_run(fit) -> None:
    class Gone(Slow):
        async def generate(self, request):
            if len(self.requests) >= 30:
                raise EngineOutage("the server has gone")
            return await super().generate(request)

    with pytest.raises(EngineOutage, match="the server has gone"):
        fit(agent(), streaming(engine=Gone()), max_epochs=EPOCHS)


def test_an_error_in_the_background_ends_the_run_with_its_own_words(fit) -> None:
    class Odd(Slow):
        async def generate(self, request):
            if len(self.requests) >= 30:
                raise RolloutError("no turn at all")
            return await super().generate(request)

    with pytest.raises(RolloutError, match="no turn at all"):
        fit(agent(), streaming(engine=Odd()), max_epochs=EPOCHS)


def test_a_group_that_fails_takes_its_place_and_is_counted(fit) -> None:
    def fails(task, attempt, text=""):
        if task.id == "train-2":
            raise OSError("broken")

    trained = Trained()
    data = streaming(Countdown(TURNS, fails))
    fit(agent(), data, callbacks=[trained], max_epochs=EPOCHS)
    failed = sum(len(collection.failures) for collection in trained.collections)
    expected = drawn(data)
    assert failed == sum(1 for _, name, sibling in expected if name == "train-2" and sibling == 0) > 0
    assert trained.uids == Counter(uid for uid in expected if uid[1] != "train-2")
    assert all(len(c.trajectories) // 2 + len(c.failures) == SIZE for c in trained.collections)


def test_a_prompt_that_does_not_fit_is_found_at_the_start(fit) -> None:
    with pytest.raises(ConfigurationError, match="context_limit=3"):
        fit(agent(), streaming(context_limit=3), max_epochs=2)


def test_an_engine_that_does_not_take_new_weights_is_found_out(fit) -> None:
    class Old(Slow):
        def load_weights(self, weights, version):
            super().load_weights(weights, 17 if version else 0)

    with pytest.raises(RolloutError, match=r"tokens are of weights \[17\]"):
        fit(agent(), streaming(engine=Old()), max_epochs=EPOCHS)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks", "ignore:Checkpoint directory")
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resumed_run_trains_what_was_left(trainer, tmp_path, staleness, caplog) -> None:
    before, after = Trained(), Trained()
    data = streaming(max_staleness=staleness)
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    first = trainer(max_epochs=-1, max_steps=2, callbacks=[before, save], enable_checkpointing=True)
    path = {"ckpt_path": tmp_path / "last.ckpt"}
    first.fit(agent(), datamodule=data)
    assert f"{staleness * SIZE} groups were drawn and are not trained" in caplog.text
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)  # plain containers
    (state,) = checkpoint["RolloutDataModule"]["background"]
    assert (state["collection"], state["drawn"]) == (2, (2 + staleness) * SIZE)
    assert len(state["groups"]) == staleness * SIZE
    again = streaming(max_staleness=staleness)
    trainer(max_epochs=EPOCHS, callbacks=[after]).fit(agent(), datamodule=again, **path)
    assert before.uids + after.uids == drawn(data)
    finished = sum("trajectories" in group for group in state["groups"])
    assert after.figures[0]["rollout/restarted_groups"] == staleness * SIZE - finished
    assert all(c.stream.staleness_max <= staleness for c in after.collections)
    for wrong, sentence in ((0, "would forget"), (staleness - 1, "would forget|too many for")):
        with pytest.raises(ConfigurationError, match=sentence):
            trainer(max_epochs=EPOCHS).fit(agent(), datamodule=streaming(max_staleness=wrong), **path)
    other = streaming(max_staleness=staleness, seed=1)
    with pytest.raises(ConfigurationError, match="now give task"):
        trainer(max_epochs=EPOCHS).fit(agent(), datamodule=other, **path)


def test_a_run_that_goes_on_in_the_same_objects_trains_what_was_left(trainer) -> None:
    trained, data, module = Trained(), streaming(max_staleness=2), agent()
    one = trainer(max_epochs=-1, max_steps=2, callbacks=[trained])
    one.fit(module, datamodule=data)
    one.fit_loop.epoch_loop.max_steps, one.fit_loop.max_epochs = -1, EPOCHS
    one.fit(module, datamodule=data)
    assert trained.uids == drawn(data)


METHODS = ("__init__", "attach", "load_weights", "open", "generate", "release", "close")
Mute = type("Mute", (), {name: getattr(ScriptedEngine, name) for name in METHODS})  # from before there was streaming


@pytest.mark.parametrize(
    ("settings", "objective", "sentence"),
    [
        ({"max_staleness": -1}, PolicyGradient(), r"data\.max_staleness must be 0 or more, got -1"),
        ({"resample": 1}, PolicyGradient(), r"data\.resample=1 .* set one of them to 0"),
        ({"engine": Mute()}, PolicyGradient(), "Mute does not say that it can"),
        ({}, PolicyGradient(old="recompute"), r"set objective\.mismatch"),
    ],
)
def test_what_cannot_work_is_refused(fit, settings, objective, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        fit(agent(objective=objective), streaming(**settings))


def test_recomputed_log_probabilities_are_corrected(fit) -> None:
    trained = Trained()
    objective = PolicyGradient(old="recompute", mismatch=Mismatch())
    fit(agent(objective=objective), streaming(engine=LocalEngine()), callbacks=[trained], max_epochs=3)
    assert trained.figures[0]["train/mismatch_factor"] == pytest.approx(1.0, abs=1e-4)
    assert trained.figures[2]["train/mismatch_kl"] > 0
