#!/bin/bash
# mini-swe-agent.
export HOME="$(mktemp -d)" PYTHONPATH=/agent/python PYTHONDONTWRITEBYTECODE=1
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
exec python3 /agent/python/bin/mini -y --exit-immediately -l 0 -m "openai/$OPENAI_MODEL" -t "$AGENTRL_STATEMENT"
