#!/bin/bash
# Codex. The container is its sandbox.
export HOME="$(mktemp -d)" PATH="/agent/bin:$PATH"
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<END
model = "$OPENAI_MODEL"
model_provider = "gateway"
web_search = "disabled"
[model_providers.gateway]
name = "gateway"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
exec /agent/node_modules/.bin/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
    "$@" "$AGENTRL_STATEMENT"
