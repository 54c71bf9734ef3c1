"""`agentrl view --export`: a run as one page."""
