"""``agentrl new``: templates for user packages."""
