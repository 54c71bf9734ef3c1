"""Follow tutorials: write their files, run their commands, and compare the output with the pages.

    python docs/follow_tutorial.py FOLDER docs/tutorials/PAGE.md... [--pictures]

A fenced block with a title is a file. In a ``console`` block, lines after ``$`` are commands. A ``text`` block shows
what the commands before it print: its lines must appear in the output in this order. Numbers may differ, and ``...``
stands for any text. A block without a language shows output that differs between machines, such as a model's text; it
is not compared. Commands in ``sh`` blocks are not run: servers, clusters, other machines.

With ``--pictures``, each file that a comment such as ``<!-- picture: runs/words/plots/overview.png -->`` names is
copied to the image that the page shows below the comment.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order.

    >>> for block in blocks('```python title="a.py"\\nx = "1"\\n```\\n````text\\n```\\n````\\n'):
    ...     print(block)
    Block(language='python', title='a.py', text='x = "1"\\n')
    Block(language='text', title='', text='```\\n')
    """
    pattern = r"^(`{3,})(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^\1$"
    return (Block(*match[1:]) for match in re.findall(pattern, page, re.MULTILINE | re.DOTALL))


def follow(page: str, folder: Path, run: Callable[[str], str]) -> None:
    """Write the files of a page into ``folder`` and run its commands with ``run``, which returns their output.

    Raises:
        ValueError: if the page shows output that the commands did not print
    """
    output = ""
    for block in blocks(page):
        if block.title:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            commands = block.text.replace("\\\n", " ").splitlines()
            if not all(command.startswith("$ ") for command in commands):
                raise ValueError(f"a console block contains a line that is not a command:\n{block.text}")
            output = "".join(run(command.removeprefix("$ ")) for command in commands)
        elif block.language == "text":
            missing = first_missing_line(block.text, output)
            if missing is not None:
                raise ValueError(f"the page shows a line that was not printed: {missing!r}. Printed:\n{output}")
        elif block.language not in ("", "sh"):
            raise ValueError(f"a {block.language} block has no title, so it is neither a file nor a command")


def first_missing_line(shown: str, printed: str) -> str | None:
    """Return the first line of ``shown`` that does not follow the lines before it in ``printed``; None if all do.

    >>> first_missing_line("step 1/20  reward 0.4\\n...\\nbest ... 20", "step 1/9 reward 1\\nbest step 9")
    >>> first_missing_line("step 2\\nreward 1", "reward 1\\nstep 2")
    'reward 1'
    """
    lines = iter(_masked(line) for line in printed.splitlines())
    for line in shown.splitlines():
        words = _masked(line)
        expected = ".*".join(re.escape(part) for part in words.split("..."))
        if words not in ("", "...") and not any(re.fullmatch(expected, candidate) for candidate in lines):
            return line
    return None


def _masked(line: str) -> str:
    numbers = r"[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?k?"
    return " ".join(re.sub(numbers, "#", line).split())


def copy_pictures(page: Path, folder: Path) -> None:
    """Copy the pictures that a page names in comments from ``folder`` to where the page shows them."""
    pattern = r"<!-- picture: (\S+) -->\s*!\[[^]]*\]\((\S+)\)"
    for source, target in re.findall(pattern, page.read_text(encoding="utf-8")):
        shutil.copyfile(folder / source, page.parent / target)


def main() -> None:
    """Follow pages one after the other in a folder, and print each command with its output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--pictures", action="store_true", help="copy the pictures of the pages into docs/images")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    def run(command: str) -> str:
        print(f"$ {command}", flush=True)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(["bash", "-c", command], cwd=options.folder, **streams) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        if process.returncode != 0:
            sys.exit(f"the command ended with exit code {process.returncode}")
        return "".join(lines)

    for page in options.pages:
        follow(page.read_text(encoding="utf-8"), options.folder, run)
        if options.pictures:
            copy_pictures(page, options.folder)


if __name__ == "__main__":
    main()
