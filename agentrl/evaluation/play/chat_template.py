"""A prompt as a user message in the model's own chat template; untrusted text stays plain text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec

_PLACE = "\ue000the prompt\ue000"  # private-use characters, which no template and no problem contains


class TemplatedCodec(TextCodec):
    """Encodes a prompt between the template's text before and after a user message, up to the start of the reply.

    Special tokens in the template are encoded as such; special tokens in the prompt are split into plain text. If the
    tokenizer would merge a character of the template with one of the prompt, they stay two tokens.
    """

    def __init__(self, tokenizer: Any, name: str, *, generation_ends: Iterable[int] = ()) -> None:
        """Raises SettingsError if the tokenizer of the model ``name`` has no template, or one that alters text."""
        super().__init__(tokenizer, generation_ends=generation_ends)
        if not tokenizer.chat_template:
            raise SettingsError(
                f"evaluation.chat_template=true, but the tokenizer of {name} has no chat template; leave it out for a "
                "base model"
            )
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _PLACE}], tokenize=False, add_generation_prompt=True
        )
        if rendered.count(_PLACE) != 1:
            raise SettingsError(f"the chat template of {name} does not write a user's message once as it is")
        before, after = rendered.split(_PLACE)
        self._before = tuple(tokenizer(before, add_special_tokens=False)["input_ids"])
        self._after = tuple(tokenizer(after, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids up to the start of the model's reply."""
        return self._before + self.encode(text) + self._after
