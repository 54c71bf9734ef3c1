#!/bin/bash
# OpenCode. Its small model writes titles, which are not trained.
export HOME="$(mktemp -d)" OPENCODE_CONFIG_CONTENT
OPENCODE_CONFIG_CONTENT=$(cat <<END
{
  "provider": {
    "gateway": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
      "models": {"$OPENAI_MODEL": {}, "$OPENAI_MODEL:frozen": {}}
    }
  },
  "small_model": "gateway/$OPENAI_MODEL:frozen",
  "permission": "allow",
  "autoupdate": false,
  "share": "disabled"
}
END
)
exec /agent/node_modules/.bin/opencode run -m "gateway/$OPENAI_MODEL" "$@" "$AGENTRL_STATEMENT"
