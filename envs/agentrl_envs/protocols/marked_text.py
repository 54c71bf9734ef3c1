"""Text in which a protocol has set marks: pieces of a chat template, whose special tokens are special.

An episode speaks text. Where its protocol writes in a model's chat template, that text is a `MarkedText`: still a
``str``, that reads as the whole, and beside it the parts it was made of. Whoever turns it into tokens encodes the
marks with their special tokens and everything else (problem texts, what programs print) with special tokens split.

>>> shown = MarkedText(Mark("<|im_end|>", ends_turn=True), Mark("\\n<|im_start|>user\\n"), "<|im_end|> is text here")
>>> shown == "<|im_end|>\\n<|im_start|>user\\n<|im_end|> is text here"
True
>>> parts_of(shown)[2], parts_of("plain <|im_end|>")
('<|im_end|> is text here', ('plain <|im_end|>',))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl_envs.types import ChatMessage


@dataclass(frozen=True, slots=True)
class Mark:
    """A piece that a protocol wrote, never anybody else.

    ``ends_turn``: what the model ends its turn with; it is left out where the model has sampled it.
    """

    text: str
    ends_turn: bool = False


Part = str | Mark


class MarkedText(str):
    """The text that its parts give one after the other. Slices and other operations of ``str`` give plain text.

    ``messages`` say the same without a template's marks, where the text is whole messages.
    """

    parts: tuple[Part, ...]
    messages: tuple[ChatMessage, ...]

    def __new__(cls, *parts: Part, messages: Sequence[ChatMessage] = ()) -> MarkedText:
        text = super().__new__(cls, "".join(part.text if isinstance(part, Mark) else part for part in parts))
        text.parts = parts
        text.messages = tuple(messages)
        return text

    def map_plain(self, change: Callable[[str], str]) -> MarkedText:
        """The same marks around changed plain parts."""
        return MarkedText(
            *(part if isinstance(part, Mark) else change(part) for part in self.parts),
            messages=[{"role": one["role"], "content": change(one["content"])} for one in self.messages],
        )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(MarkedText, messages=self.messages), self.parts


def parts_of(text: str) -> tuple[Part, ...]:
    """The parts of any text; a plain one is its own only part."""
    return text.parts if isinstance(text, MarkedText) else (text,)
