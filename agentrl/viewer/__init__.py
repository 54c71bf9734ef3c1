"""`agentrl view`: runs and evaluations in the browser. Only reads files, and imports no torch."""
