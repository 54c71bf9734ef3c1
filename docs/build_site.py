"""Build the documentation's site into build/site, or serve it: ``python docs/build_site.py [--serve]``.

The site has the layout of the repository, so that one link works on both: build/pages contains a symbolic link for
each page of ``nav`` in zensical.toml and for each file that a page refers to. Pages of ``docs/api/`` exist on the site
alone; each lists the public names of one module.

The build fails if a page of docs/ is missing in ``nav``, if Zensical prints a warning, or if a link of the built site
leads to a page or an anchor that does not exist. Links to other sites are not opened.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
API = "docs/api/"

MEMBERS = "    options:\n      heading: {name}\n      heading_level: 2\n      toc_label: {name}\n"


def main() -> int:
    """Collect the pages, run Zensical and check the result. Returns the exit code."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    pages = list(_pages(project["nav"]))
    missing = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} - set(pages)
    if missing:
        print(f"zensical.toml: nav lacks {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    _collect([*pages, *project["extra_css"], *project["extra_javascript"]])
    command = [sys.executable, "-m", "zensical"]
    if sys.argv[1:] == ["--serve"]:
        return subprocess.run([*command, "serve"], cwd=ROOT).returncode
    built = subprocess.run([*command, "build", "--strict", "--clean"], cwd=ROOT).returncode
    problems = [] if built else list(broken_links(SITE))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if built or problems else 0


def _pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)


def _collect(pages: list[str]) -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in pages:
        target = PAGES / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.startswith(API):
            target.write_text(_api_page(target.stem), encoding="utf-8")
            continue
        text = (ROOT / page).read_text(encoding="utf-8")
        referred = re.findall(r"\]\(([^)#\s]+)|\b(?:src|srcset|href)=\"([^\"#]+)\"", text)
        files = [(ROOT / page).parent / (link or source) for link, source in referred]
        for file in [ROOT / page, *files]:
            path = Path(os.path.normpath(file))
            link = PAGES / path.relative_to(ROOT)
            if path.is_file() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)


def _api_page(module: str) -> str:
    """Return a page with a heading for each function and class that a module exports, in alphabetical order."""
    exporter = importlib.import_module(module)
    lines = [f"# {module}\n", f"{(exporter.__doc__ or '').strip()}\n"]
    names = getattr(exporter, "__all__", None) or [
        name for name, value in vars(exporter).items() if getattr(value, "__module__", "") == module and name[0] != "_"
    ]
    for name in sorted(names, key=str.lower):
        value = getattr(exporter, name)
        if hasattr(value, "__qualname__"):  # A constant has no docstring to render.
            lines += [f"::: {value.__module__}.{value.__qualname__}", MEMBERS.format(name=name)]
    return "\n".join(lines)


class _Page(HTMLParser):
    """The anchors of a page, and the links, images and scripts that it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def broken_links(site: Path) -> Iterator[str]:
    """Yield a message for each link within the site whose file or anchor does not exist."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in known:
                yield f"{path.relative_to(site)}: {link} leads nowhere"


if __name__ == "__main__":
    sys.exit(main())
