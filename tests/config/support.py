"""What tests of settings share."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_settings
from agentrl.errors import SettingsError


def refused(*overrides: str, **more: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides=list(overrides), **more)  # type: ignore[arg-type]
    return str(caught.value)


def overlay(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
