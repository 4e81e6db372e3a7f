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
from collections.abc import Sequence

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.actions import ActionCount, MalformedAction, tagged_action
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.environments.medical_questions import Question, read_questions
from sorl_lightning.rollout.search.retrievers import Retriever
from sorl_lightning.types import Message, Task

REMEDY = "give a file in the schema of MedQA, MedMCQA or PubMedQA, or make one: sorl data hpo FOLDER"


class MultipleChoice(Environment):
    """Questions with lettered options, of which one is right.

    Args:
        train: file of the split, .json, .jsonl or parquet, in the schema of MedQA, MedMCQA or PubMedQA; validation,
            test: likewise. A split that is not used may be left out.
        search: retriever to look things up with; without one an episode is one answer long.
        topk: passages a search.
        max_tasks: the first so many questions of each split; None takes all.
        invalid_penalty: taken off the reward of an answer that holds no action.

    Step info: "success"; "searches", so far; "malformed" and "valid_fraction", of the actions.
    """

    def __init__(
        self,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        search: Retriever | None = None,
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
        self._searches, self._count = 0, ActionCount()
        question = self._question
        options = [f"{letter}. {text}" for letter, text in question.options]
        parts = [*([question.context] if question.context else []), question.text, *options, self._rule()]
        return [Message(role="user", content="\n".join(parts))]

    async def step(self, text: str) -> Step:
        """Search or answer, by the first action outside thoughts; an answer is a letter or an option's text."""
        if self._over:
            return Step("", 0.0, True, info=self._info)
        tags = ("answer",) if self.search is None else ("search", "answer")
        try:
            tag, content = tagged_action(text, tags)
        except MalformedAction:
            return self._malformed(f"This is no action. {self._rule()}")
        words = " ".join(content.split())
        if tag == "answer":
            return self._answered(words)
        self._count.add(True)
        self._searches += 1
        return Step(await self._found(words), 0.0, False, info=self._info)

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
            return self._malformed(f"{words[:100]!r} is none of {letters}.")
        self._count.add(True)
        self._over, self._success = True, meant[0] == self._question.answer
        return Step("", float(self._success), True, info=self._info)

    def _malformed(self, answer: str) -> Step:
        self._count.add(False)
        return Step(answer, -self.invalid_penalty, False, info=self._info)

    async def _found(self, query: str) -> str:
        assert self.search is not None
        passages = await self.search.search(query, self.topk)
        texts = [passage.contents for passage in passages]
        return "<information>{}</information>".format("\n".join(texts) or "No document matches.")

    def _rule(self) -> str:
        tool = "" if self.search is None else "Search with <search>words</search>, "
        return f"{tool}{'answer' if tool else 'Answer'} with <answer>letter</answer>."

    @property
    def _info(self) -> dict[str, bool | float]:
        return {"success": self._success, "searches": float(self._searches), **self._count.info}
