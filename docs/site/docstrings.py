"""Extension of Griffe that shows doctests and cross-references as code, because Markdown supports neither."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)(>>> .*(?:\n *\S.*)*)", re.MULTILINE)
"""A doctest with its output, up to the next empty line."""

REFERENCE = re.compile(r":[a-z]+:`[.~]?([^`]+)`")
"""A reference in the notation of Sphinx, for example :func:`train`."""


class PlainDocstrings(griffe.Extension):
    """Rewrites what is specific to Python in the docstrings that a page shows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            text = REFERENCE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", text)
