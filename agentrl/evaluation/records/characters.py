"""Whole characters out of text that came in pieces: halves that belong together are joined, lone ones replaced."""

from __future__ import annotations

_LOWEST_BYTE, _HIGHEST_BYTE = 0xDC80, 0xDCFF  # how Python's "surrogateescape" stands for a byte that is no UTF-8


def whole_characters(text: str) -> str:
    """``text`` that UTF-8 can write.

    A JSON escape may give half a character (``\\\\ud83d``), whose other half came in the next piece or never; a byte of
    UTF-8 that stood alone in its piece is expected as ``surrogateescape`` gives it.

    >>> whole_characters("\\ud83d" + "\\ude00"), whole_characters("a\\ud83d b")
    ('😀', 'a\ufffd b')
    >>> halves = [part.decode(errors="surrogateescape") for part in ("é".encode()[:1], "é".encode()[1:])]
    >>> whole_characters("".join(halves))
    'é'
    """
    if text.isascii():
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    known = "".join(
        "\ufffd" if 0xD800 <= ord(one) <= 0xDFFF and not _LOWEST_BYTE <= ord(one) <= _HIGHEST_BYTE else one
        for one in joined
    )
    return known.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
