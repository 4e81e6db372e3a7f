"""Turn messages into tokens, and never tokens into other tokens.

A policy turn is generated from ids only. What follows it (the end of the message, the observation, the header of the
next answer) is rendered by the model's own chat template as *suffix text*, encoded on its own and appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.types import Message

# Stand-ins that no template rewrites: plain letters, no white space to strip.
ANSWER, OBSERVATION = "SORLanswerXQZ", "SORLobservationXQZ"


class Chat:
    """Renders with one tokenizer's chat template.

    Args:
        tokenizer: must carry a chat template.

    Raises:
        ConfigurationError: it has no template, no end token, or the template does not quote messages verbatim.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigurationError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template")
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(f"the tokenizer {tokenizer.name_or_path!r} has no end token (eos_token)")
        self.tokenizer = tokenizer

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens of the first prompt, up to where the policy begins to write."""
        text = self._render(messages)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def continuation(self, completion_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Tokens between a completion and the next one.

        The template's end of message is left out where the policy has sampled it itself.
        """
        closing, before, after = self._suffix
        ids = self.tokenizer.encode(before + observation + after, add_special_tokens=False)
        if completion_ids and closing and completion_ids[-1] == closing[0]:
            return (*closing[1:], *ids)
        return (*closing, *ids)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the end of text, and the template's end of message where that is one token."""
        closing = self._suffix[0]
        return tuple(dict.fromkeys((self.tokenizer.eos_token_id, *closing[:1])))

    def text(self, completion_ids: Sequence[int]) -> str:
        """What the environment reads of a completion."""
        decoded = self.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        return decoded if isinstance(decoded, str) else decoded[0]

    @cached_property
    def _suffix(self) -> tuple[tuple[int, ...], str, str]:
        """End of the policy's message as ids, text before the observation, text after it."""
        conversation: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": OBSERVATION},
        ]
        rendered = self._render(conversation)
        if rendered.count(ANSWER) != 1 or rendered.count(OBSERVATION) != 1:
            raise ConfigurationError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not quote each message once, verbatim"
            )
        before, after = rendered.split(ANSWER)[1].split(OBSERVATION)
        ids = self.tokenizer.encode(before, add_special_tokens=False)
        specials = set(self.tokenizer.all_special_ids)
        if ids and ids[0] in specials:
            closing = str(self.tokenizer.convert_ids_to_tokens(ids[0]))
            if before.startswith(closing):
                return (ids[0],), before[len(closing) :], after
        return (), before, after

    def _render(self, messages: Sequence[Message]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [dict[str, str](**message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        )
