"""Tasks of the user's own, with tools that are typed Python functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.actions import ActionCount, MalformedAction, ToolCall, tool_calls, without_thoughts
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.environments.recorded_chats import Source
from sorl_lightning.rollout.records import Record, messages_of, records
from sorl_lightning.types import Message, Task

Tool = Callable[..., Any]
Grade = Callable[[str, Mapping[str, Any]], float]
SYSTEM = """You may call functions. They are described here as JSON:
<tools>
{schemas}
</tools>
To call one, write its name and arguments as JSON between tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
An answer without a call is your final answer."""


def exact_match(answer: str, row: Mapping[str, Any]) -> float:
    """1 where the final answer is the row's ``answer``, white space and case aside, else 0."""
    return float(" ".join(answer.lower().split()) == " ".join(str(row["answer"]).lower().split()))


class ToolUse(Environment):
    """Questions of one's own, answered with the help of tools.

    A row has ``prompt``, text or messages, and whatever ``grade`` reads; a turn that calls no tool is the final answer.
    A call that is malformed, does not fit the function's parameters, or raises is answered with what was wrong, and
    counted. In YAML tools and ``grade`` are paths of functions: ``tools: [my_project.add]``.

    Args:
        train: parquet or JSON Lines file, or rows such as a ``datasets.Dataset``.
        tools: functions with type hints and a docstring that describes each argument, as transformers'
            ``get_json_schema`` reads them.
        validation: rows of the split; None: there is none.
        test: likewise.
        grade: called with the final answer, outside thoughts, and the row; the reward, 1 and above counting as success.
        system: text before the prompt; ``{schemas}`` stands for the tools. None leaves it out, and so does having no
            tools.

    Step info: "success"; "malformed" and "valid_fraction" of calls; "failed_calls", that the function refused.
    """

    def __init__(
        self,
        train: Source,
        tools: Sequence[Tool] = (),
        validation: Source | None = None,
        test: Source | None = None,
        grade: Grade = exact_match,
        system: str | None = SYSTEM,
    ) -> None:
        self.sources = {"train": train, "validation": validation, "test": test}
        self.tools = {tool.__name__: tool for tool in tools}
        self.schemas = [schema(tool) for tool in tools]
        self.grade = grade
        self.system = system

    def tasks(self, split: str) -> list[Task]:
        """A task a row; its id is the row's ``id``, or the split and the row's number.

        Raises:
            ConfigurationError: a row has no prompt.
        """
        source = self.sources[split]
        return [] if source is None else [self._task(row, split, number) for number, row in records(source)]

    def _task(self, row: Record, split: str, number: int) -> Task:
        try:
            prompt = messages_of(row.get("prompt"))
        except (ValueError, AttributeError) as error:
            raise ConfigurationError(f"ToolUse, {split} row {number}: prompt: {error}") from error
        if self.grade is exact_match and "answer" not in row:
            raise ConfigurationError(
                f"ToolUse, {split} row {number} has no answer for exact_match to compare with: add one, or set grade"
            )
        return Task(id=str(row.get("id", f"{split}-{number}")), prompt=tuple(self._told(prompt)), payload=dict(row))

    def _told(self, prompt: list[Message]) -> list[Message]:
        """The prompt with the tools in its system message."""
        if not self.tools or self.system is None:
            return prompt
        text = self.system.format(schemas="\n".join(json.dumps(one) for one in self.schemas))
        if prompt[0]["role"] == "system":
            return [Message(role="system", content=f"{prompt[0]['content']}\n\n{text}"), *prompt[1:]]
        return [Message(role="system", content=text), *prompt]

    def reset(self, task: Task) -> list[Message]:
        """Nothing beyond the task's prompt."""
        self._row, self._count, self._failed = task.payload, ActionCount(), 0
        self._end: Step | None = None
        return []

    def step(self, text: str) -> Step:
        """Call the tools that the text names, or grade it."""
        if self._end is not None:
            return self._end._replace(reward=0.0)
        if not self._is_call(text):
            answer = without_thoughts(text).strip()
            reward = float(self.grade(answer, self._row))
            self._end = Step("", reward, True, info=self._info(reward >= 1))
            return self._end
        try:
            calls = tool_calls(text, list(self.tools))
        except MalformedAction as error:
            self._count.add(False)
            return Step(f"Error: {error}", 0.0, False, info=self._info(False))
        self._count.add(True)
        answers = [Message(role="tool", content=self._call(call)) for call in calls]
        return Step(answers, 0.0, False, info=self._info(False))

    def _is_call(self, text: str) -> bool:
        """Whether it means to call: with a tag, or as some models write, with the JSON alone."""
        said = without_thoughts(text)
        return bool(self.tools) and ("<tool_call>" in said or said.lstrip().startswith('{"name"'))

    def _call(self, call: ToolCall) -> str:
        """What the function returns, as text or JSON; where it refuses, why."""
        function = self.tools[call.name]
        try:
            inspect.signature(function).bind(**call.arguments)
            result = function(**call.arguments)
        except Exception as error:  # a tool's failure is something to learn from, whatever it is
            self._failed += 1
            return f"Error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    def _info(self, success: bool) -> dict[str, float | bool]:
        return {"success": success, "failed_calls": float(self._failed), **self._count.info}


def schema(tool: Tool) -> Mapping[str, Any]:
    """The tool as chat templates describe it.

    Raises:
        ConfigurationError: it lacks type hints, or a docstring that describes each argument.
    """
    try:
        found: Mapping[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigurationError(f"ToolUse.tools: {getattr(tool, '__name__', tool)}: {error}") from error
    return found
