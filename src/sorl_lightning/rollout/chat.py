"""Turn messages into tokens, and never tokens into other tokens.

A policy turn is generated from ids only. What follows it (the end of the message, the observation, the header of the
next answer) is rendered by the model's own chat template as *suffix text*, encoded on its own and appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.types import Message

# Stand-ins that no template rewrites: plain letters, no white space to strip.
ANSWER, OBSERVATION = "SORLanswerXQZ", "SORLobservationXQZ"


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a model's chat template is used.

    Args:
        history: what becomes of earlier turns where the template would render them otherwise than they were said (it
            drops <think> text, moves the system message). "bridge": they stay, token by token, and the episode is one
            row. "fork": the prompt is rendered anew and starts a new row, as if the model were served by its template.
        observation_role: role of an observation that is plain text; "tool" where the template knows that role.
        arguments: further arguments of the template, such as {enable_thinking: false}.
    """

    history: Literal["bridge", "fork"] = "bridge"
    observation_role: Literal["user", "tool"] = "user"
    arguments: dict[str, Any] = field(default_factory=dict)


class Chat:
    """Renders with one tokenizer's chat template.

    Args:
        tokenizer: must carry a chat template.
        format: how the template is used.

    Raises:
        ConfigurationError: it has no template, no end token, or the template does not quote messages verbatim or
            refuses the role of observations.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: ChatFormat = ChatFormat()) -> None:
        if not tokenizer.chat_template:
            raise ConfigurationError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template")
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(f"the tokenizer {tokenizer.name_or_path!r} has no end token (eos_token)")
        self.tokenizer = tokenizer
        self.format = format
        self._closing = self._find_closing()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the end of text, and the template's end of message where that is one token."""
        closing = () if self._closing is None else (self._closing,)
        return tuple(dict.fromkeys((self.tokenizer.eos_token_id, *closing)))

    def open(self, messages: Sequence[Message]) -> Conversation:
        """A conversation that these messages open."""
        return Conversation(self, messages)

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens of the first prompt, up to where the policy begins to write."""
        return self.encode(self.render(messages))

    def continuation(self, completion_ids: Sequence[int], observation: str | Sequence[Message]) -> tuple[int, ...]:
        """Tokens between a completion and the next one.

        The template's end of message is left out where the policy has sampled it itself.
        """
        ids = self.encode(self.suffix(observation))
        if self._closing is not None and completion_ids and completion_ids[-1] == self._closing:
            return ids[ids.index(self._closing) + 1 :]
        return ids

    def suffix(self, observation: str | Sequence[Message]) -> str:
        """Text that the template puts between an answer and the next one."""
        conversation = [Message(role="user", content="x"), Message(role="assistant", content=ANSWER)]
        return self.render([*conversation, *self.messages(observation)]).partition(ANSWER)[2]

    def messages(self, observation: str | Sequence[Message]) -> list[Message]:
        """An observation as messages; plain text is one message in the role of observations."""
        if isinstance(observation, str):
            return [Message(role=self.format.observation_role, content=observation)]
        return list(observation)

    def text(self, completion_ids: Sequence[int]) -> str:
        """What the environment reads of a completion."""
        decoded = self.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        return decoded if isinstance(decoded, str) else decoded[0]

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of rendered text, which already has its special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: Sequence[Message]) -> str:
        """Text of a conversation, up to where the policy writes next.

        Raises:
            ConfigurationError: the template refuses these messages; its own words are quoted.
        """
        plain = [dict[str, str](**message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    plain, tokenize=False, add_generation_prompt=True, **self.format.arguments
                )
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses messages of the roles {roles}: {error}"
            ) from error

    def _find_closing(self) -> int | None:
        """The token that ends the policy's message: the first special one between it and the observation."""
        suffix = self.suffix(OBSERVATION)
        if suffix.count(OBSERVATION) != 1 or ANSWER in suffix:
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not quote each message once, verbatim"
            )
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        return next((token for token in self.encode(suffix.partition(OBSERVATION)[0]) if token in special), None)


class Conversation:
    """The prompt of one episode as it grows.

    Args:
        chat: renders it.
        messages: that open it.

    Attributes:
        prompt_ids: the full prompt of the next turn.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message]) -> None:
        self._chat = chat
        self._messages = list(messages)
        self._text = chat.render(messages)
        self.prompt_ids = chat.encode(self._text)

    def extend(self, completion_ids: Sequence[int], observation: str | Sequence[Message]) -> None:
        """Append what the policy said and what it is answered.

        With history "fork" the prompt is the template's own rendering wherever that does not extend what the policy
        has seen and said. Text of earlier turns is then encoded anew, as context: it is trained where it was sampled.
        """
        bridged = (*self.prompt_ids, *completion_ids, *self._chat.continuation(completion_ids, observation))
        if self._chat.format.history == "bridge":
            self.prompt_ids = bridged
            return
        said = self._chat.text(completion_ids)
        extended = self._text + said + self._chat.suffix(observation)
        self._messages += [Message(role="assistant", content=said), *self._chat.messages(observation)]
        self._text = self._chat.render(self._messages)
        self.prompt_ids = bridged if self._text == extended else self._chat.encode(self._text)
