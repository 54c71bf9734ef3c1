"""The Docker engine of slow tests, and an image with Python."""

from __future__ import annotations

import os

import docker
import pytest
from docker.errors import DockerException

BASE_IMAGE = os.environ.get("AGENTRL_SANDBOX_IMAGE", "")


def need_docker() -> None:
    """Skip the test without an engine or an image; in CI it fails."""
    try:
        docker.from_env().close()
    except DockerException:
        found = False
    else:
        found = bool(BASE_IMAGE)
    if not found:
        why = "needs a Docker engine and AGENTRL_SANDBOX_IMAGE; `. .ci/docker.sh` builds the image"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
