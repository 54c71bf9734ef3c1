"""Chat templates in the style of other families, and a tokenizer with their special tokens."""

from __future__ import annotations

from typing import Any

from rollout.templates import QWEN, chat_tokenizer

LLAMA = (
    "<|begin|>"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "<|header|>system<|/header|>\n\n{{ system }}<|eot|>"
    "{%- for message in messages %}"
    "{%- if message.tool_calls is defined and message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{%- endif %}"
    '{{- \'<|header|>assistant<|/header|>\n\n{"name": "\' + message.tool_calls[0].function.name }}'
    "{{- '\", \"parameters\": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot|>' }}"
    "{%- elif message.role == 'tool' %}{{- '<|header|>ipython<|/header|>\n\n' }}"
    "{{- message.content | tojson }}{{- '<|eot|>' }}"
    "{%- else %}{{- '<|header|>' + message.role + '<|/header|>\n\n' }}"
    "{%- if tools and message.role == 'user' and loop.first %}{{- 'Reply with {\"name\": ..., \"parameters\": ...}' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n\n' }}{%- endif %}"
    "{{- message.content + '<|eot|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\n\n' }}{%- endif %}"
)
"""As Llama 3.1: the tools in the first user's message, responses as JSON, one call at a time."""

MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}"
    "{%- endif %}"
    "{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(turn=0) %}"
    "{%- for message in messages %}"
    "{%- if message.role != 'tool' and not message.tool_calls %}"
    "{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{%- endif %}"
    "{%- endfor %}"
    "<s>"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools and message == asked[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}"
    "{{- '[INST] ' }}{%- if system is defined and loop.last %}{{- system + '\n\n' }}{%- endif %}"
    "{{- message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- call.function | tojson | string }}{%- endfor %}{{- ']</s>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content + ', \"call_id\": \"' + message.tool_call_id + '\"}' }}"
    "{{- '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}"
    "{%- endfor %}"
)
"""As Mistral 7B 0.3: no generation prompt, a response only behind a call, tools before the last user's message."""

QWEN_CODER = QWEN.replace(
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}",
    "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{%- for name, value in call.function.arguments | items %}"
    "{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}",
)
"""As Qwen3-Coder: calls as tags, values without quotes."""

TOKENS = {
    LLAMA: ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<|python_tag|>"),
    MISTRAL: (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    QWEN_CODER: (),
}
FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "qwen_coder": QWEN_CODER}


def family_tokenizer(template: str) -> Any:
    """The byte tokenizer with the family's special tokens and its template."""
    tokenizer = chat_tokenizer(template)
    if TOKENS[template]:
        tokenizer.add_special_tokens({"extra_special_tokens": list(TOKENS[template])})
    return tokenizer
