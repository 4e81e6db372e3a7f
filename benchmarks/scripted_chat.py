"""A chat model that says as much in every turn, so that two trainers are given the same work to the token.

Its weights are random but for its output layer, whose row for each token of a script points at the token before it: at
temperature 1 it samples the script, all but surely, whatever came before. A turn is ``words`` tokens, of which the first
is one of many that mean the same, so that siblings part from one another as those of a real policy do, and the last is
a call of the tool ``look``, which answers with a text of about as many tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from generation_by_turns import build_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
QUESTIONS = [
    f"Look around until you have seen every room of the house, then say which of them holds the {thing}."
    for thing in ("coin", "lamp")
]
WAYS = 64  # tokens that a turn may begin with
ROOMS = [
    "kitchen",
    "pantry",
    "corridor",
    "bedroom",
    "laundry",
    "garden",
    "garage",
    "street",
    "bathroom",
    "cellar",
    "attic",
    "porch",
]
POINTED = 4.0  # so far does the script's next token stand out, in units of the embedding's norm


def sight(visit: int) -> str:
    """What the tool says of a room."""
    names = [ROOMS[(visit + place) % len(ROOMS)] for place in range(len(ROOMS))]
    return "You see a door to each of these rooms: " + ", ".join(names) + "."


def look() -> str:
    """Look around.

    Returns:
        What there is to see.
    """
    return sight(0)


def build(folder: Path, template: str, words: int, hidden: int, layers: int, vocabulary: int, kv_heads: int) -> None:
    """Write model and tokenizer to ``folder``.

    Args:
        template: a chat template that knows tools.
        words: tokens of a turn, the call and the end token among them.
        hidden: width; layers: decoder layers; vocabulary: rows of the output layer, most of them never sampled.
        kv_heads: heads of keys and values, 64 wide.
    """
    ways = [f"<way{place}>" for place in range(WAYS)]
    script = [ways[0], *(f"<w{place}>" for place in range(words - 3))]
    tokenizer = _tokenizer(template, [*ways, *script[1:]])
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    prompt = tokenizer.apply_chat_template(messages, tools=[look], add_generation_prompt=True, return_dict=False)
    script += [CALL, tokenizer.eos_token]
    said = [prompt[-1], *tokenizer.convert_tokens_to_ids(script)]
    size = max(vocabulary, len(tokenizer))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": kv_heads, "head_dim": 64}
    model = build_model(hidden, layers, size, 8192, tie_word_embeddings=False, **heads, **ends)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
        for before, after in zip(said, said[1:], strict=False):
            head[after] += POINTED * embedding[before] / embedding[before].norm()
        others = tokenizer.convert_tokens_to_ids(ways)
        head[others], embedding[others] = head[said[1]].clone(), embedding[said[1]].clone()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(template: str, script: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the texts that occur."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([template, *QUESTIONS, *map(sight, range(len(ROOMS)))] * 2, trainer)
    raw.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    raw.add_tokens([AddedToken(token, normalized=False) for token in (*script, CALL)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=template
    )
