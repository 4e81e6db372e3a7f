"""Three turns with templates that rewrite history: what was sampled is trained once, as it was sampled."""

from __future__ import annotations

import asyncio

import pytest

from doubles import ScriptedEngine
from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.chat import Chat, ChatFormat
from sorl_lightning.rollout.collector import Collector, Sampling
from sorl_lightning.rollout.environment import Step
from sorl_lightning.rollout.packing import pack
from sorl_lightning.types import Message, Task
from templates import HOSTILE, KINDS, LLAMA3, MISTRAL, QWEN3, with_kind

SAID = (
    "<think>\nfirst the kitchen\n</think>\n\nmove north",
    "<think>\nthen a door\n</think>\n\nopen door",
    "take coin",
)


class Rooms:
    """Three turns; ``messages`` turns its observations into messages."""

    def __init__(self, messages=str, system=False):
        self.messages = messages
        self.system = system

    def tasks(self, split):
        return [Task(id=f"{split}-0")]

    def reset(self, task):
        self.turns = 0
        system = [Message(role="system", content="You play.")] if self.system else []
        return [*system, Message(role="user", content="Find the coin.")]

    def step(self, text):
        self.turns += 1
        return Step(self.messages(f"You see door {self.turns}."), 0.0, self.turns == 3)


def two_tools(text):
    return [Message(role="tool", content=text), Message(role="tool", content="It is noon.")]


class Spied:
    """Counts encodings of text that came out of a decoding."""

    def __init__(self, tokenizer, monkeypatch):
        self.decoded, self.encoded = [], []
        decode, encode = type(tokenizer).decode, type(tokenizer).encode
        monkeypatch.setattr(type(tokenizer), "decode", lambda t, *a, **k: self.keep(self.decoded, decode(t, *a, **k)))
        monkeypatch.setattr(type(tokenizer), "encode", lambda t, text, **k: self.see(text) or encode(t, text, **k))

    def keep(self, store, text):
        store.append(text)
        return text

    def see(self, text):
        self.encoded.append(text)

    @property
    def count(self):
        return sum(piece in text for text in self.encoded for piece in self.decoded if piece)


def ragged(tokenizer, text):
    """Tokens that decode to ``text`` and are not the ones that it encodes to."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]


def play(tokenizer, format, environment, end=True):
    """The one trajectory of an engine that says ``SAID``, letter by letter, and the prompts that it saw."""
    chat = Chat(tokenizer, format)
    stop = [chat.stop_token_ids[-1]] if end else []
    completions = [[*ragged(tokenizer, text), *stop] for text in SAID]
    engine = ScriptedEngine()
    engine.script = lambda request: (
        completions[len(engine.requests) - 1],
        [-1.0] * len(completions[len(engine.requests) - 1]),
    )
    collector = Collector(environment, engine, chat, Sampling(max_tokens=99, context_limit=4096, temperature=1.0))
    collection = asyncio.run(collector.collect(environment.tasks("train"), max_turns=3, seed=0))
    (trajectory,) = collection.trajectories
    assert [list(turn.completion.token_ids) for turn in trajectory.turns] == completions
    assert [turn.prompt_ids for turn in trajectory.turns] == [request.prompt_ids for request in engine.requests]
    return trajectory


def each_token_once(trajectory):
    rows = pack([trajectory])
    assert int(rows.generated.sum()) == trajectory.generated_tokens
    for turn in trajectory.turns:
        assert rows.input_ids[rows.turn == turn.index].tolist() == list(turn.completion.token_ids)
    return rows


@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("kind", KINDS)
def test_bridged_history_is_what_was_seen_and_said(tokenizer, monkeypatch, kind, role, end) -> None:
    if role not in KINDS[kind].roles:
        pytest.skip("the template does not know this role")
    changed = with_kind(tokenizer, KINDS[kind])
    assert changed.encode(SAID[0], add_special_tokens=False) != ragged(changed, SAID[0])
    spied = Spied(changed, monkeypatch)
    trajectory = play(changed, ChatFormat(observation_role=role), Rooms(), end)
    assert spied.decoded == list(SAID)
    assert spied.count == 0
    for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        seen = (*turn.prompt_ids, *turn.completion.token_ids)
        assert following.prompt_ids[: len(seen)] == seen
    assert len(each_token_once(trajectory).input_ids) == 1
    between = changed.decode(list(trajectory.turns[1].prompt_ids[len(trajectory.turns[0].prompt_ids) :]))
    assert between.startswith(SAID[0] + KINDS[kind].end)
    assert between.count(KINDS[kind].end) == (1 if kind == "mistral" else 2)


@pytest.mark.parametrize(
    ("kind", "role", "rows"),
    [
        ("smollm2", "user", 1),
        ("llama3", "user", 1),
        ("llama3", "tool", 1),
        ("qwen3", "tool", 1),  # thoughts since the last question stay
        ("qwen3", "user", 3),
        ("hostile", "tool", 3),
    ],
)
def test_a_fork_starts_a_row_where_the_template_rewrites(tokenizer, kind, role, rows) -> None:
    changed = with_kind(tokenizer, KINDS[kind])
    format = ChatFormat(history="fork", observation_role=role)
    trajectory = play(changed, format, Rooms())
    assert len(each_token_once(trajectory).input_ids) == rows
    chat = Chat(changed, format)
    conversation = [Message(role="user", content="Find the coin.")]
    for turn in trajectory.turns:
        assert changed.decode(list(turn.prompt_ids)) == chat.render(conversation)
        conversation += [
            Message(role="assistant", content=turn.text),
            Message(role=role, content=turn.observation or ""),
        ]
    thoughts = changed.decode(list(trajectory.turns[2].prompt_ids)).count("<think>")
    assert thoughts == (0 if rows == 3 else 2)


def test_a_system_message_that_moves_to_the_last_question_forks_or_stays(tokenizer) -> None:
    changed = with_kind(tokenizer, MISTRAL)
    for history, rows in (("bridge", 1), ("fork", 3)):
        trajectory = play(changed, ChatFormat(history=history), Rooms(system=True))
        assert len(each_token_once(trajectory).input_ids) == rows
        last = changed.decode(list(trajectory.turns[2].prompt_ids))
        assert last.count("You play.") == 1
        assert ("[INST] You play." in last.rpartition("</s>")[2]) == (history == "fork")


@pytest.mark.parametrize("history", ["bridge", "fork"])
@pytest.mark.parametrize("kind", [QWEN3, HOSTILE], ids=["qwen3", "hostile"])
def test_two_tool_messages_are_one_user_block_in_both_paths(tokenizer, kind, history) -> None:
    changed = with_kind(tokenizer, kind)
    trajectory = play(changed, ChatFormat(history=history), Rooms(two_tools))
    assert trajectory.turns[0].observation == "You see door 1.\nIt is noon."
    each_token_once(trajectory)
    block = changed.decode(list(trajectory.turns[1].prompt_ids)).rpartition("<|im_end|>\n<|im_start|>user")[2]
    assert block == (
        "\n<tool_response>\nYou see door 1.\n</tool_response>\n<tool_response>\nIt is noon.\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_reach_the_template(tokenizer) -> None:
    changed = with_kind(tokenizer, QWEN3)
    trajectory = play(changed, ChatFormat(arguments={"enable_thinking": False}), Rooms())
    assert changed.decode(list(trajectory.turns[2].prompt_ids)).count("<think>\n\n</think>\n\n") == 3
    assert len(each_token_once(trajectory).input_ids) == 1


def test_a_role_that_the_template_refuses_is_named_before_anything_is_sampled(tokenizer) -> None:
    with pytest.raises(ConfigurationError, match=r"refuses messages of the roles user, assistant, tool: roles must al"):
        Chat(with_kind(tokenizer, MISTRAL), ChatFormat(observation_role="tool"))


def test_the_end_of_a_message_may_follow_other_text(tokenizer) -> None:
    spaced = LLAMA3._replace(template=LLAMA3.template.replace("trim + '<|eot_id|>'", "trim + '\n<|eot_id|>'"))
    chat = Chat(with_kind(tokenizer, spaced))
    end = chat.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    cut, ended = chat.continuation([400], "door"), chat.continuation([400, end], "door")
    assert chat.tokenizer.decode(list(cut)).startswith("\n<|eot_id|><|start_header_id|>user")
    assert cut[cut.index(end) + 1 :] == ended
