"""Add the built site to a folder of versions: ``python docs/publish_site.py FOLDER VERSION``.

``FOLDER/VERSION`` becomes a copy of build/site. ``FOLDER/versions.json`` lists the versions, newest first; the version
selector of the theme reads it. ``FOLDER/index.html`` leads to ``latest``, the version of the branch `main`, or to the
newest release if there is no ``latest``.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

SITE = Path(__file__).parent.parent / "build" / "site"


def publish(site: Path, folder: Path, version: str) -> None:
    """Replace one version of the folder, and list all of them.

    Raises:
        ValueError: if the version is neither ``latest`` nor numbers such as ``0.1.0``
    """
    _order(version)
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    versions = sorted((path.parent.name for path in folder.glob("*/index.html")), key=_order, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (folder / "versions.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(folder / versions[0] / "404.html", folder / "404.html")
    redirect = f'<!doctype html><title>agentrl</title><meta http-equiv="refresh" content="0; url={versions[0]}/">\n'
    (folder / "index.html").write_text(redirect, encoding="utf-8")
    (folder / ".nojekyll").touch()  # GitHub would leave out files that begin with an underscore


def _order(version: str) -> list[float]:
    try:
        return [float("inf")] if version == "latest" else [int(number) for number in version.split(".")]
    except ValueError:
        raise ValueError(f"the version {version!r} is neither 'latest' nor a release such as 0.1.0") from None


if __name__ == "__main__":
    publish(SITE, Path(sys.argv[1]), sys.argv[2])
