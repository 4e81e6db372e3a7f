"""A teacher behind HTTP: vLLM servers that score the student's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError, EngineOutage
from sorl_lightning.rollout.event_loop import EventLoopThread
from sorl_lightning.rollout.gathering import together
from sorl_lightning.rollout.vllm.client import Client, ServerError
from sorl_lightning.rollout.vllm.prompt_scores import scores_of, top_of
from sorl_lightning.teachers import Teacher
from sorl_lightning.types import RolloutBatch, TeacherScores

T = TypeVar("T")
ROUTE = "/v1/completions"
QUICK = 60.0  # seconds, for questions about the server
SAMPLE = 200  # token ids, spread over the vocabulary, whose text both sides must read alike


class ServedTeacher(Teacher):
    """A frozen model on vLLM servers that somebody else runs, asked for ``prompt_logprobs``.

    Servers score at temperature 1 and return the most likely tokens, at most --max-logprobs of them: enough for the
    divergences over the top K and the sampled ones, and refused for the others before training. Rows are shared out
    among the servers. A plain ``vllm serve`` will do.

    Args:
        urls: addresses of the servers; all serve the same model, and all ranks ask all of them.
        model: name under which they serve it.
        concurrency: most rows in flight, for each server.
        request_timeout: seconds that a row may take.
        attempts: times that a row is asked for before the server counts as lost.
        outage_timeout: seconds that a server may be away, at the start and later.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str = "teacher",
        concurrency: int = 64,
        request_timeout: float = 600.0,
        attempts: int = 5,
        outage_timeout: float = 120.0,
    ) -> None:
        if not urls:
            raise ConfigurationError("ServedTeacher.urls must name at least one server")
        for name, value in (("concurrency", concurrency), ("attempts", attempts)):
            if value < 1:
                raise ConfigurationError(f"ServedTeacher.{name} must be at least 1, got {value}")
        if not request_timeout > 0:
            raise ConfigurationError(f"ServedTeacher.request_timeout must be above 0 seconds, got {request_timeout}")
        self.urls = urls
        self.model = model
        self.concurrency = concurrency
        self.request_timeout = request_timeout
        self.attempts = attempts
        self.outage_timeout = outage_timeout
        self._vocabulary = 0

    def attach(self, student: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        """Wait for the servers, and ask each whether it serves the model and reads text as the student does.

        Raises:
            ConfigurationError: one does not.
            EngineOutage: one is not up within ``outage_timeout`` seconds.
        """
        self._vocabulary = vocabulary
        self._asked(lambda clients: self._meet(clients, student, tokenizer))

    def check(self, top_k: int, temperature: float) -> None:
        """Have every server score two tokens that way.

        Raises:
            ConfigurationError: one refuses; the message has its words.
        """
        if temperature != 1.0:
            raise ConfigurationError(
                f"ServedTeacher scores at temperature 1, as vLLM does, and is asked for {temperature}: set "
                "objective.temperature (or data.temperature and model.temperature) to 1, or take a LocalTeacher"
            )
        try:
            self._scored([[0, 1]] * len(self.urls), self._at_most(top_k))
        except ServerError as error:
            raise ConfigurationError(
                f"the teacher cannot return the top {top_k}: {error}. Lower objective.top_k, or start the server with "
                "a higher --max-logprobs"
            ) from error

    def score(self, rows: RolloutBatch, top_k: int, temperature: float) -> TeacherScores:
        """As ``Teacher.score``; K is at most the vocabulary.

        Raises:
            ConfigurationError: the temperature is not 1.
            EngineOutage: a server is lost and does not come back.
            RolloutError: a server refuses a row, or returns something that is no score.
        """
        if temperature != 1.0:
            self.check(top_k, temperature)
        top_k = self._at_most(top_k)
        shape = rows.turn.shape
        ids = torch.zeros(*shape, top_k, dtype=torch.long)
        logprobs, sampled = torch.zeros(*shape, top_k), torch.zeros(shape)
        asked = [(row, positions) for row, positions in enumerate(generated(rows)) if positions]
        prompts = [rows.input_ids[row, : positions[-1] + 1].tolist() for row, positions in asked]
        for (row, positions), entries in zip(asked, self._scored(prompts, top_k), strict=True):
            tokens = rows.input_ids[row].tolist()
            found = [top_of(entries[at], tokens[at], top_k, self._vocabulary) for at in positions]
            ids[row, positions] = torch.tensor([top for top, _, _ in found], dtype=torch.long).view(len(found), top_k)
            logprobs[row, positions] = torch.tensor([values for _, values, _ in found]).view(len(found), top_k)
            sampled[row, positions] = torch.tensor([own for _, _, own in found])
        return TeacherScores(ids=ids, logprobs=logprobs, sampled_logprobs=sampled)

    def close(self) -> None:
        """There is nothing to close: connections last as long as a call."""

    # Servers

    def _asked(self, ask: Callable[[Sequence[Client]], Coroutine[Any, Any, T]]) -> T:
        """What comes of asking the servers, over connections that are closed afterwards."""

        async def connected() -> T:
            clients = [Client(url, self.concurrency) for url in self.urls]
            try:
                return await ask(clients)
            finally:
                await asyncio.gather(*(client.close() for client in clients))

        loop = EventLoopThread()
        try:
            return loop.run(connected())
        finally:
            loop.close()

    async def _meet(self, clients: Sequence[Client], student: str, tokenizer: PreTrainedTokenizerBase) -> None:
        await asyncio.gather(*(client.wait_until_healthy(self.outage_timeout) for client in clients))
        step = max(1, len(tokenizer) // SAMPLE)
        text = tokenizer.decode(list(range(0, len(tokenizer), step)))
        expected = tokenizer.encode(text, add_special_tokens=False)
        for client in clients:
            served = {entry["id"]: entry for entry in (await client.get("/v1/models", QUICK))["data"]}
            if self.model not in served:
                raise ConfigurationError(
                    f"{client.url} serves {[*served]} and no model {self.model!r}: set ServedTeacher.model"
                )
            if served[self.model].get("parent") is not None:
                raise ConfigurationError(
                    f"{self.model!r} at {client.url} is adapters on another model, of which vLLM 0.32 cannot score "
                    "several prompts at once: merge them into the teacher's weights"
                )
            question = {"model": self.model, "prompt": text, "add_special_tokens": False}
            if (await client.post("/tokenize", question, QUICK))["tokens"] != expected:
                raise ConfigurationError(
                    f"the teacher at {client.url} and student {student} read text as different tokens: distillation "
                    "compares token by token, so both need the same tokenizer"
                )

    def _scored(self, prompts: Sequence[list[int]], top_k: int) -> list[Sequence[Any]]:
        """The servers' words on each prompt."""

        def ask(clients: Sequence[Client]) -> Coroutine[Any, Any, list[Sequence[Any]]]:
            asked = enumerate(prompts)
            return together([self._ask(clients[number % len(clients)], prompt, top_k) for number, prompt in asked])

        return self._asked(ask)

    async def _ask(self, client: Client, prompt: list[int], top_k: int) -> Sequence[Any]:
        """What the server says of each token of the prompt; once more where it has been away."""
        question = {"model": self.model, "prompt": prompt, "prompt_logprobs": top_k, "max_tokens": 1, "temperature": 0}

        def read(answer: dict[str, Any]) -> Sequence[Any]:
            return scores_of(answer, len(prompt), client.url)

        try:
            return await client.retried(ROUTE, question, read, self.request_timeout, self.attempts)
        except EngineOutage:
            await client.wait_until_healthy(self.outage_timeout)
            return await client.retried(ROUTE, question, read, self.request_timeout, self.attempts)

    def _at_most(self, top_k: int) -> int:
        return min(top_k, self._vocabulary)


def generated(rows: RolloutBatch) -> list[list[int]]:
    """Positions of each row's generated tokens; the first of a row has nothing that precedes it."""
    mask: Tensor = rows.generated.clone()
    mask[:, 0] = False
    return [row.nonzero()[:, 0].tolist() for row in mask]
