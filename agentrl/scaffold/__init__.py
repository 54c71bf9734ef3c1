"""``agentrl new``: write the start of something of one's own."""
