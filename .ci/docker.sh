#!/usr/bin/env bash
# Source this: it makes a Docker engine answer, builds the sandbox's image from packages of this machine, and exports
# AGENTRL_SANDBOX_IMAGE. No registry of images is needed: the base is made of Debian packages.
set -euo pipefail

BASE=agentrl-sandbox-base:trixie
export AGENTRL_SANDBOX_IMAGE="${AGENTRL_SANDBOX_IMAGE:-agentrl-sandbox:test}"

install_engine() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v docker-compose >/dev/null || missing+=(docker-compose)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    [ ${#missing[@]} -eq 0 ] && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iptables "${missing[@]}" >/dev/null
}

start_engine() {
    docker info >/dev/null 2>&1 && return
    local log
    log="$(mktemp)"
    (setsid dockerd >"$log" 2>&1 &)
    for _ in $(seq 120); do
        docker info >/dev/null 2>&1 && return
        sleep 0.5
    done
    echo "dockerd does not answer; its last words:" >&2
    tail -n 20 "$log" >&2
    return 1
}

# A Debian 13 with Python 3.13 and its venv module, from wherever this machine has its packages.
make_base() {
    docker image inspect "$BASE" >/dev/null 2>&1 && return
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv trixie - | docker import - "$BASE" >/dev/null
}

# pip runs here, with this machine's settings; inside the build everything comes from the context.
build_image() {
    local context packages
    context="$(mktemp -d)"
    packages="$(mktemp -d)"
    cp -r sandbox/. "$context"
    python3 -m venv "$packages"
    "$packages/bin/pip" download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.13 \
        --dest "$context/wheels" hatchling -r sandbox/requirements-image.txt \
        $(python3 -c 'import tomllib; print(*tomllib.load(open("sandbox/pyproject.toml", "rb"))["project"]["dependencies"])')
    docker build --quiet --network host --build-arg BASE_IMAGE="$BASE" -t "$AGENTRL_SANDBOX_IMAGE" "$context" >/dev/null
    rm -rf "$context" "$packages"
}

install_engine
start_engine
make_base
build_image
