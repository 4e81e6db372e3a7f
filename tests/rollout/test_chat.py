"""Token in, token out: what was sampled is never encoded again."""

from __future__ import annotations

import copy

import pytest

from sorl_lightning.errors import ConfigurationError
from sorl_lightning.rollout.chat import Chat

CHATML = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return Chat(changed)


def test_a_conversation_in_pieces_is_the_conversation_whole(chat, tokenizer) -> None:
    messages = [{"role": "user", "content": "find the coin"}]
    answer = [*tokenizer.encode("take coin"), tokenizer.eos_token_id]
    pieces = (*chat.opening(messages), *answer, *chat.continuation(answer, "You see a door."))
    messages += [{"role": "assistant", "content": "take coin"}, {"role": "user", "content": "You see a door."}]
    assert pieces == chat.opening(messages)


def test_the_end_of_message_is_added_only_where_the_policy_did_not_sample_it(tokenizer) -> None:
    chat = with_template(tokenizer, CHATML)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    sampled = chat.continuation([400, end], "door")
    cut = chat.continuation([400, 401], "door")
    assert cut == (end, *sampled)
    assert tokenizer.decode(list(cut)) == "<|end|>\n<|user|>user\ndoor<|end|>\n<|user|>assistant\n"


def test_ids_that_decode_to_the_same_text_stay_the_ids_that_were_sampled(chat, tokenizer, monkeypatch) -> None:
    split = [*tokenizer.encode(" ki"), *tokenizer.encode("tchen")]
    assert tokenizer.decode(split) == " kitchen"
    assert tokenizer.encode(" kitchen") != split
    encoded: list[str] = []
    plain = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text, **k: encoded.append(text) or plain(self, text, **k)
    )
    chat.continuation(split, "door")
    assert not any("kitchen" in text for text in encoded)


def test_stop_tokens_and_text(chat, tokenizer) -> None:
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    assert chat.text([*tokenizer.encode("take coin"), tokenizer.eos_token_id]) == "take coin"


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template"), ("{{ messages[0]['content'] }}", "does not quote each message once")],
)
def test_templates_that_cannot_work_are_refused(tokenizer, template, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        with_template(tokenizer, template).continuation([5], "x")
