#!/bin/bash
# Claude Code. Its calls to the small model, for example for titles, are not trained.
export HOME="$(mktemp -d)" ANTHROPIC_DEFAULT_HAIKU_MODEL="$ANTHROPIC_MODEL:frozen"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
exec /agent/node_modules/.bin/claude -p "$AGENTRL_STATEMENT" --allowedTools Write,Edit,Bash "$@"
