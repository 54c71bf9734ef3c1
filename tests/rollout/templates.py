"""Chat templates and a tokenizer for them: one like Qwen2.5's, one of a thinking model that strips what it thought."""

from __future__ import annotations

from typing import Any

from rollout.fakes import byte_tokenizer

TOOL_TOKENS = ("</tool_call>", "<tool_response>", "</tool_response>")

_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'\\n</tools>\\nCall one by <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n\' }}'
    "{%- endif %}"
)
_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
)
_RESPONSE = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)


def _template(assistant: str, generation: str) -> str:
    return (
        _TOOLS + "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}" + _RESPONSE + "{%- elif message.role == 'assistant' %}"
        "{{- '<|im_start|>assistant\\n' }}" + assistant + _CALLS + "{{- '<|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}" + generation + "{%- endif %}"
    )


QWEN = _template("{{- message.content }}", "{{- '<|im_start|>assistant\\n' }}")

THINKING = _template(
    "{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{- said }}",
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)


def chat_tokenizer(template: str | None) -> Any:
    """The byte tokenizer with Qwen3's tokens for tools (added, not special) and a template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(TOOL_TOKENS))
    tokenizer.chat_template = template
    return tokenizer
