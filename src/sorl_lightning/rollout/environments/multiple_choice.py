"""Medical multiple choice: read, search if there is a tool for it, and answer with a letter.

Worked example, with a search tool:

    user        A patient presents with coxa valga, carious teeth. Which of the following disorders is most likely?
                A. Marfan syndrome
                B. Hypophosphatemic rickets
                Search with <search>words</search>, answer with <answer>letter</answer>.
    assistant   <search>coxa valga carious teeth</search>
    user        <information>Hypophosphatemic rickets: coxa valga, ...</information>
    assistant   <answer>B</answer>          reward 1, terminated, success
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.interfaces import Interface
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.environments.medical_questions import Question, read_questions
from sorl_lightning.rollout.environments.text_game import THOUGHT
from sorl_lightning.types import Message, Task

ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
REMEDY = "give a file in the schema of MedQA, MedMCQA or PubMedQA, or make one: sorl data hpo FOLDER"


class SearchTool(Interface):
    """Finds passages for a query; the retrievers of the search task are such tools."""

    @abstractmethod
    def check(self) -> Any:
        """Make sure that it works, before any rollout.

        Raises:
            ConfigurationError: it does not.
        """
        ...

    @abstractmethod
    async def search(self, query: str, topk: int) -> Sequence[Any]:
        """The best passages, best first: texts, or objects with the text as ``contents``."""
        ...


class MultipleChoice(Environment):
    """Questions with lettered options, of which one is right.

    Args:
        train: file of the split, .json or .jsonl, in the schema of MedQA, MedMCQA or PubMedQA; validation, test:
            likewise. A split that is not used may be left out.
        search: tool to look things up with; without one an episode is one answer long.
        topk: passages a search.
        max_tasks: the first so many questions of each split; None takes all.
        invalid_penalty: taken off the reward of an answer that holds no action.

    Step info: "success"; "valid", whether the text held an action, 1.0 or 0.0; "searches", so far.
    """

    def __init__(
        self,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        search: SearchTool | None = None,
        topk: int = 3,
        max_tasks: int | None = None,
        invalid_penalty: float = 0.0,
    ) -> None:
        if topk < 1 or (max_tasks is not None and max_tasks < 1):
            raise ConfigurationError(f"topk and max_tasks must be at least 1, got {topk} and {max_tasks}")
        if invalid_penalty < 0:
            raise ConfigurationError(f"invalid_penalty is {invalid_penalty}, need 0 or more")
        self.train = train
        self.validation = validation
        self.test = test
        self.search = search
        self.topk = topk
        self.max_tasks = max_tasks
        self.invalid_penalty = invalid_penalty

    def tasks(self, split: str) -> Sequence[Task]:
        """Questions in the file's order; ids are the split's name and theirs."""
        files = {"train": self.train, "validation": self.validation, "test": self.test}
        if split not in files:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(files)}")
        path = files[split]
        if path is None:
            raise ConfigurationError(f"{split} is not set; {REMEDY}")
        if self.search is not None:
            self.search.check()
        questions = read_questions(path, split)[: self.max_tasks]
        return [Task(id=f"{split}-{question.id}", payload=question) for question in questions]

    def reset(self, task: Task) -> list[Message]:
        """The question, its options, and how to answer."""
        self._question: Question = task.payload
        self._over = self._success = False
        self._searches = 0
        question = self._question
        options = [f"{letter}. {text}" for letter, text in question.options]
        parts = [*([question.context] if question.context else []), question.text, *options, self._rule()]
        return [Message(role="user", content="\n".join(parts))]

    async def step(self, text: str) -> Step:
        """Search or answer, by the first action outside thoughts; an answer is a letter or an option's text."""
        if self._over:
            return Step("", 0.0, True, False, self._info(valid=False))
        found = ACTION.search(THOUGHT.sub("", text))
        verb, words = (found[1], " ".join(found[2].split())) if found else ("", "")
        if verb == "answer":
            return self._answered(words)
        if verb == "search" and words and self.search is not None:
            self._searches += 1
            return Step(await self._found(words), 0.0, False, False, self._info(valid=True))
        return Step(f"This is no action. {self._rule()}", -self.invalid_penalty, False, False, self._info(valid=False))

    def expert_action(self) -> str:
        """The right letter; where there is a tool, after a search for the question's own words."""
        if self._over:
            raise LookupError("the question is answered")
        if self.search is not None and not self._searches:
            return f"<search>{' '.join(re.findall(r'[^<>]+', self._question.text))}</search>"
        return f"<answer>{self._question.answer}</answer>"

    def admissible_actions(self) -> list[str]:
        """One answer for each option."""
        return sorted(f"<answer>{letter}</answer>" for letter, _ in self._question.options)

    def _answered(self, words: str) -> Step:
        options = self._question.options
        said = words.lower().removesuffix(".")
        meant = [letter for letter, text in options if said in (letter.lower(), text.lower().removesuffix("."))]
        if not meant:
            letters = ", ".join(letter for letter, _ in options)
            info = self._info(valid=False)
            return Step(f"{words[:100]!r} is none of {letters}.", -self.invalid_penalty, False, False, info)
        self._over, self._success = True, meant[0] == self._question.answer
        return Step("", float(self._success), True, False, self._info(valid=True))

    async def _found(self, query: str) -> str:
        assert self.search is not None
        passages = await self.search.search(query, self.topk)
        texts = [str(getattr(passage, "contents", passage)) for passage in passages]
        return "<information>{}</information>".format("\n".join(texts) or "No document matches.")

    def _rule(self) -> str:
        tool = "" if self.search is None else "Search with <search>words</search>, "
        return f"{tool}{'answer' if tool else 'Answer'} with <answer>letter</answer>."

    def _info(self, valid: bool) -> dict[str, bool | float]:
        return {"success": self._success, "valid": float(valid), "searches": float(self._searches)}
