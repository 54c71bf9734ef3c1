"""`agentrl view`: runs and evaluations in a browser on this machine. Reads files only, and needs no torch."""
