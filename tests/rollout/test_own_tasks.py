"""Tasks, tools and conversations of the user's own."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import agent
from sorl_lightning.datamodule import RolloutDataModule
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.objectives import Imitation
from sorl_lightning.rollout.contract import check_environment
from sorl_lightning.rollout.engines import ExpertEngine
from sorl_lightning.rollout.environment import open_episode
from sorl_lightning.rollout.environments import RecordedChats, ToolUse
from sorl_lightning.types import Message

ROWS = [
    {"id": "sum", "prompt": "What is 17 + 25?", "answer": "42"},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], "answer": "4"},
]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def fail(reason: str) -> str:
    """Never work.

    Args:
        reason: why.
    """
    raise LookupError(reason)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def episode(rows=ROWS, tools=(add, fail), number=0, **settings):
    world = open_episode(ToolUse(rows, tools, **settings))
    task = world.tasks("train")[number]
    assert world.reset(task) == []
    return world, task


def test_a_tool_is_called_and_the_answer_graded() -> None:
    world, task = episode()
    assert task.id == "sum"
    assert [message["role"] for message in task.prompt] == ["system", "user"]
    assert '"name": "add"' in task.prompt[0]["content"]
    step = world.step(f"<think>add them</think>{call('add', a=17, b=25)}")
    assert step == ([Message(role="tool", content="42")], 0.0, False, False, {
        "success": False, "failed_calls": 0.0, "malformed": 0.0, "valid_fraction": 1.0})  # fmt: skip
    end = world.step(" 42 ")
    assert (end.observation, end.reward, end.terminated, end.info["success"]) == ("", 1.0, True, True)
    assert world.step("again") == end._replace(reward=0.0)


def test_two_calls_in_one_turn_are_two_messages_and_a_call_may_be_bare_json() -> None:
    world, _ = episode()
    both = world.step(call("add", a=1, b=2) + call("fail", reason="closed"))
    assert [message["content"] for message in both.observation] == ["3", "Error: LookupError: closed"]
    assert both.info["failed_calls"] == 1.0
    assert world.step('{"name": "add", "arguments": {"a": 1, "b": 1}}').observation[0]["content"] == "2"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<tool_call>{</tool_call>", "not JSON"),
        ("<tool_call>", "there is no <tool_call>...</tool_call>"),
        (call("divide", a=1), "no tool 'divide'; there are add, fail"),
    ],
)
def test_a_malformed_call_is_told_and_counted(text, answer) -> None:
    world, _ = episode()
    step = world.step(text)
    assert answer in step.observation
    assert (step.reward, step.terminated, step.info["malformed"], step.info["valid_fraction"]) == (0.0, False, 1.0, 0.0)


def test_arguments_that_do_not_fit_are_told() -> None:
    world, _ = episode()
    (message,) = world.step(call("add", a=1, c=2)).observation
    assert message["content"] == "Error: TypeError: missing a required argument: 'b'"


def test_the_tools_join_a_system_message_that_is_there() -> None:
    _, task = episode(number=1)
    assert task.id == "train-2"
    assert [message["role"] for message in task.prompt] == ["system", "user"]
    assert task.prompt[0]["content"].startswith("Be brief.\n\nYou may call functions.")
    assert ToolUse(ROWS).tasks("train")[0].prompt == (Message(role="user", content="What is 17 + 25?"),)


def test_a_wrong_answer_and_an_own_grade() -> None:
    world, _ = episode()
    assert world.step("41").info["success"] is False
    graded, _ = episode(grade=lambda answer, row: len(answer) / 4)
    end = graded.step("xy")
    assert (end.reward, end.info["success"]) == (0.5, False)


def test_rows_come_from_files_and_data_sets(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist([ROWS[0]]), tmp_path / "rows.parquet")
    from_lines = ToolUse(tmp_path / "rows.jsonl", validation=tmp_path / "rows.parquet")
    assert [task.id for task in from_lines.tasks("train")] == ["sum", "train-2"]
    assert from_lines.tasks("validation")[0].payload == ROWS[0]
    assert from_lines.tasks("test") == []


def no_types(a):
    """A tool without types."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolUse(ROWS, [no_types]), "no_types"),
        (lambda: ToolUse([{"answer": "1"}]).tasks("train"), "train row 1: prompt: need text or messages"),
        (lambda: ToolUse([{"prompt": "x"}]).tasks("train"), "train row 1 has no answer"),
        (lambda: ToolUse("none.jsonl").tasks("train"), "none.jsonl cannot be read: No such file"),
        (lambda: RecordedChats([{"messages": "hello"}]).tasks("train"), "have a turn of the assistant"),
        (lambda: RecordedChats([{"text": "hello"}]).tasks("train"), "row 1: messages: need text or messages"),
        (lambda: RecordedChats([{"messages": CHAT[:2] + CHAT[1:]}]).tasks("train"), "follow one another"),
    ],
)
def test_rows_that_cannot_be_played_are_one_sentence(make, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


CHAT = [
    {"role": "user", "content": "you are in a room"},
    {"role": "assistant", "content": "look"},
    {"role": "tool", "content": "a coin"},
    {"role": "assistant", "content": "take coin"},
    {"role": "user", "content": "well done"},
]


def test_a_recorded_chat_is_played_back() -> None:
    world = open_episode(RecordedChats([{"messages": CHAT}]))
    (task,) = world.tasks("train")
    assert world.reset(task) == CHAT[:1]
    assert world.expert_action() == "look"
    assert world.step("look") == ([CHAT[2]], 0.5, False, False, {"success": True, "agreement": 1.0})
    assert world.step("drop coin") == ("", 0.0, True, False, {"success": False, "agreement": 0.5})
    with pytest.raises(LookupError):
        world.expert_action()


def test_both_keep_the_contract() -> None:
    check_environment(RecordedChats([{"messages": CHAT}], validation=[{"messages": CHAT[:3], "id": "v"}]))
    check_environment(ToolUse(ROWS, [add]), episodes=2)


def test_imitation_of_recorded_chats_learns_every_assistant_turn_and_nothing_else(fit) -> None:
    data = RolloutDataModule(
        RecordedChats([{"messages": CHAT}] * 2), ExpertEngine(), tasks_per_collection=2, group_size=1, max_turns=4,
        max_tokens=8, context_limit=128,
    )  # fmt: skip
    module = agent(objective=Imitation(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    fit(module, data, max_epochs=60)
    trajectory = data.collection.trajectories[0]
    assert [turn.text for turn in trajectory.turns] == ["look", "take coin"]
    assert trajectory.success
    ids = torch.tensor([trajectory.turns[0].prompt_ids])
    greedy = module.policy_model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert module.tokenizer.decode(greedy[0, ids.shape[1] :], skip_special_tokens=True) == "look"
