"""Repair of characters in text that arrived in pieces: matching surrogate halves are joined, lone halves replaced."""

from __future__ import annotations

_LOWEST_BYTE, _HIGHEST_BYTE = 0xDC80, 0xDCFF  # Python's "surrogateescape" codes for bytes that are not UTF-8


def whole_characters(text: str) -> str:
    """Return ``text`` in a form that UTF-8 can encode.

    A JSON escape may be half a character (``\\\\ud83d``) whose other half arrives in the next piece or never. A UTF-8
    byte that was alone in its piece must be passed as ``surrogateescape`` decodes it.

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
