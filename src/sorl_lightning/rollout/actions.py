"""Find the action in what a policy wrote. What a malformed one is answered is the affair of the world."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class MalformedAction(ValueError):
    """The text holds no action; the message says what is wrong with it, for the policy to read."""


class TaggedAction(NamedTuple):
    """An action between tags: ``<search>capital of Mali</search>``."""

    tag: str
    content: str


class ToolCall(NamedTuple):
    """A call of a tool by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class ActionCount:
    """Valid and malformed actions of an episode so far."""

    valid: int = 0
    malformed: int = 0

    def add(self, valid: bool) -> None:
        """Count one action."""
        self.valid += valid
        self.malformed += not valid

    @property
    def info(self) -> dict[str, float]:
        """For a step's info: "malformed", how many there were; "valid_fraction", share of all actions so far."""
        return {
            "malformed": float(self.malformed),
            "valid_fraction": self.valid / max(1, self.valid + self.malformed),
        }


def without_thoughts(text: str) -> str:
    """``text`` after its last ``</think>``; all of it where there is none.

    >>> without_thoughts("<think>go <action>west</action>?</think><action>look</action>")
    '<action>look</action>'
    """
    return text.rpartition("</think>")[2]


def tagged_action(text: str, tags: Sequence[str] = ("action",)) -> TaggedAction:
    """The first action between one of ``tags``, outside thoughts; white space around it is dropped.

    >>> tagged_action("I need a city. <search> capital of Mali </search>", ("search", "answer"))
    TaggedAction(tag='search', content='capital of Mali')

    Raises:
        MalformedAction: there is none, or it is empty.
    """
    names = "|".join(map(re.escape, tags))
    found = re.search(rf"<({names})>(.*?)</\1>", without_thoughts(text), re.DOTALL)
    if found is None:
        raise MalformedAction("there is no " + " or ".join(f"<{tag}>...</{tag}>" for tag in tags))
    if not found[2].strip():
        raise MalformedAction(f"<{found[1]}> is empty")
    return TaggedAction(found[1], found[2].strip())


def tool_calls(text: str, tools: Sequence[str] | None = None) -> list[ToolCall]:
    """Calls written as JSON, each between <tool_call> tags or the one that is all of the text outside thoughts.

    A call is ``{"name": ..., "arguments": {...}}``; arguments may themselves be a string of JSON, as some models write.

    >>> tool_calls('<tool_call>{"name": "search", "arguments": {"query": "Mali"}}</tool_call>')
    [ToolCall(name='search', arguments={'query': 'Mali'})]

    Args:
        tools: names that exist; None lets every name pass.

    Raises:
        MalformedAction: there is no call, or one is not what it should be.
    """
    said = without_thoughts(text)
    written = re.findall(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)
    if not written and not said.strip().startswith("{"):
        raise MalformedAction("there is no <tool_call>...</tool_call>")
    return [_tool_call(call, tools) for call in written or [said]]


def _tool_call(written: str, tools: Sequence[str] | None) -> ToolCall:
    try:
        call = json.loads(written)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise MalformedAction(f"the tool call is not JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise MalformedAction('a tool call is {"name": "...", "arguments": {...}}')
    if tools is not None and call["name"] not in tools:
        raise MalformedAction(f"there is no tool {call['name']!r}; there are {', '.join(tools)}")
    return ToolCall(call["name"], arguments)
