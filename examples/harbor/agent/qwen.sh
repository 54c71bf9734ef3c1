#!/bin/bash
# Qwen Code.
export HOME="$(mktemp -d)" PATH="/agent/bin:$PATH"
exec /agent/node_modules/.bin/qwen --auth-type openai --yolo -p "$AGENTRL_STATEMENT" "$@"
