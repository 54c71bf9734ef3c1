"""How the rows of a step belong together: groups of a problem, branches of a rollout, the order of model tokens."""
