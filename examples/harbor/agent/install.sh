#!/bin/bash
# Install command-line agents beside this file: bash install.sh [claude] [codex] [mini] [qwen] [opencode]
#
# The directory is then mounted at /agent in each container, whatever the task's image is. Packages with programs for
# another system do not work: run this on Linux with the C library and the architecture of the images. PYTHON is the
# version of Python in the images, for mini-swe-agent.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
declare -A npm=(
    [claude]=@anthropic-ai/claude-code [codex]=@openai/codex [qwen]=@qwen-code/qwen-code [opencode]=opencode-ai
)
packages=()
for name in "$@"; do
    if [ "$name" = mini ]; then
        python3 -m pip install --quiet --upgrade --target python --python-version "${PYTHON:-3.13}" \
            --only-binary :all: mini-swe-agent
    else
        packages+=("${npm[$name]}")
    fi
done
if [ ${#packages[@]} -gt 0 ]; then
    npm install --no-fund --no-audit --prefix . "${packages[@]}"
    mkdir -p bin
    cp -L "$(command -v node)" bin/node # Codex and Qwen Code start with Node
fi
