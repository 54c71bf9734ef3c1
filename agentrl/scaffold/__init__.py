"""``agentrl new``: templates for packages of users."""
