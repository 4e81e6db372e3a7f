"""The action in a text, or what is wrong with it."""

from __future__ import annotations

import pytest

from sorl_lightning.rollout.actions import ActionCount, MalformedAction, tagged_action, tool_calls

SEARCH = ("search", "answer")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<search>a</search>", ("search", "a")),
        ("so <answer>\n two\nlines </answer>.", ("answer", "two\nlines")),
        ("<search>first</search><answer>second</answer>", ("search", "first")),
        ("<think><answer>no</answer></think><search>yes</search>", ("search", "yes")),
        ("<search>a <answer>b</answer> c</search>", ("search", "a <answer>b</answer> c")),
    ],
)
def test_the_first_tagged_action_outside_thoughts(text, found) -> None:
    assert tagged_action(text, SEARCH) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no <search>...</search> or <answer>...</answer>"),
        ("<search>unclosed", "there is no"),
        ("<search>a</answer>", "there is no"),
        ("<Search>a</Search>", "there is no"),
        ("<answer> \n </answer>", "<answer> is empty"),
        ("<search>x</search></think>", "there is no"),
    ],
)
def test_a_malformed_tag_is_explained(text, reason) -> None:
    with pytest.raises(MalformedAction, match=reason):
        tagged_action(text, SEARCH)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', [("look", {})]),
        ('{"name": "go", "arguments": "{\\"to\\": 3}"}', [("go", {"to": 3})]),
        ('<think>{</think>{"name": "look"}', [("look", {})]),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b"}</tool_call>',
            [("a", {}), ("b", {})],
        ),
    ],
)
def test_tool_calls(text, calls) -> None:
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("look", "there is no <tool_call>"),
        ("<tool_call>look</tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "a tool call is"),
        ('<tool_call>{"name": 3}</tool_call>', "a tool call is"),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "a tool call is"),
        ('<tool_call>{"name": "fly"}</tool_call>', "no tool 'fly'; there are look, go"),
    ],
)
def test_a_malformed_call_is_explained(text, reason) -> None:
    with pytest.raises(MalformedAction, match=reason):
        tool_calls(text, ("look", "go"))


def test_actions_are_counted() -> None:
    count = ActionCount()
    assert count.info == {"malformed": 0.0, "valid_fraction": 0.0}
    for valid in (True, False, True, True):
        count.add(valid)
    assert count.info == {"malformed": 1.0, "valid_fraction": 0.75}
