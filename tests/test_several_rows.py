"""Trajectories that a chat template splits into rows: what trains them, and what cannot."""

from __future__ import annotations

import dataclasses

import lightning as L
import pytest

from conftest import TINY, agent
from doubles import Countdown, ScriptedEngine
from sorl_lightning.callbacks import ClippingTriggeredNormalization
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.models import Loaded, SmallLlama
from sorl_lightning.objectives import Mismatch, PolicyGradient
from sorl_lightning.rollout.chat import ChatFormat
from sorl_lightning.strategies import FSDP2


class Forgetful(SmallLlama):
    """Its template drops what the model said before its last turn."""

    def load(self) -> Loaded:
        model, tokenizer = super().load()
        tokenizer.chat_template = (
            "{% for message in messages %}<|{{ message['role'] }}|>"
            "{{ message['content'] if message['role'] != 'assistant' or loop.index0 >= messages|length - 2 else '' }}"
            "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        return model, tokenizer


class Rows(L.Callback):
    """Rows and trajectories with a generated token."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        own = batch.generated.any(1)
        self.rows, self.trajectories = int(own.sum()), len(batch.trajectory[batch.generated].unique())


def train(fit, micro_batches=1, callbacks=(), history="fork", **settings):
    rows = Rows()
    data = RolloutDataModule(
        Countdown((4, 4)), ScriptedEngine(), tasks_per_collection=2, group_size=2, max_turns=4, max_tokens=4,
        context_limit=128, micro_batches=micro_batches, chat=ChatFormat(history=history),
    )  # fmt: skip
    module = agent(policy=Forgetful(**dataclasses.asdict(TINY)), objective=PolicyGradient(**settings))
    fit(module, data, callbacks=[*callbacks, rows])
    return rows


SEQUENCES = [{"ratio": "sequence"}, {"ratio": "turn", "old": "recompute", "mismatch": Mismatch(level="sequence")}]


@pytest.mark.parametrize("settings", SEQUENCES, ids=["ratio", "mismatch"])
def test_a_pool_over_the_sequence_needs_its_rows_together(fit, settings) -> None:
    rows = train(fit, **settings)
    assert (rows.rows, rows.trajectories) == (12, 4)
    with pytest.raises(
        ConfigurationError, match=r"'sequence' pools over whole trajectories.*data\.micro_batches=2 may"
    ):
        train(fit, micro_batches=2, **settings)
    train(fit, micro_batches=2, history="bridge", **settings)  # one row each


def test_a_factor_for_a_trajectory_needs_its_rows_together(fit) -> None:
    train(fit, callbacks=[ClippingTriggeredNormalization(level="trajectory")])
    train(fit, 2, [ClippingTriggeredNormalization(level="trajectory")], history="bridge")
    with pytest.raises(ConfigurationError, match=r"level='trajectory' needs all rows.*set data\.micro_batches to 1"):
        train(fit, 2, [ClippingTriggeredNormalization(level="trajectory")])


def test_a_factor_for_a_trajectory_needs_one_process(trainer) -> None:
    switch = ClippingTriggeredNormalization(level="trajectory")
    with pytest.raises(ConfigurationError, match=r"level='trajectory' goes backward .* which 2 processes do not agree"):
        switch.setup(trainer(strategy=FSDP2(), devices=2), agent(), "fit")
