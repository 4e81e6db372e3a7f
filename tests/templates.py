"""Chat templates of the kinds that models carry, and a tokenizer that knows their special tokens."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A template, its special tokens, the one that ends a message, and the roles that it takes for observations."""

    template: str
    specials: tuple[str, ...]
    end: str
    roles: tuple[str, ...] = ("user", "tool")


SMOLLM2 = Kind(
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)
# Answers before the last question lose their thoughts; consecutive tool messages share one user block.
QWEN3 = Kind(
    """\
{%- set ns = namespace(last=messages|length - 1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last = messages.index(message) -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role in ('user', 'system') -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set parts = message.content.split('</think>') -%}
{%- set content = message.content if loop.index0 > ns.last else parts[-1].lstrip('\n') -%}
{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)
# Earlier thoughts go whatever came after them, and consecutive tool messages are merged.
HOSTILE = QWEN3._replace(template=QWEN3.template.replace("loop.index0 > ns.last", "loop.last"))
LLAMA3 = Kind(
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
)
# The system message belongs to the last question, roles alternate, tool messages want a call's id.
MISTRAL = Kind(
    """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set talk = messages[1:] if system else messages -%}
{{- '<s>' -}}
{%- for message in talk -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user/assistant/user/assistant/...') -}}{%- endif -%}
{%- if message.role == 'user' -%}
{{- '[INST] ' + (system + '\n\n' if system and loop.last else '') + message.content + '[/INST]' -}}
{%- else -%}{{- ' ' + message.content + '</s>' -}}{%- endif -%}
{%- endfor -%}""",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "</s>",
    roles=("user",),
)
KINDS = {"smollm2": SMOLLM2, "qwen3": QWEN3, "hostile": HOSTILE, "llama3": LLAMA3, "mistral": MISTRAL}


def with_kind(tokenizer: Any, kind: Kind) -> Any:
    """A copy of ``tokenizer`` that has the kind's template and special tokens."""
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"additional_special_tokens": list(kind.specials), "eos_token": kind.end})
    changed.chat_template = kind.template
    return changed
