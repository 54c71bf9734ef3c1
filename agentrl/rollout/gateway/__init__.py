"""The gateway: serves the policy to agent programs, and records the exact sampled tokens for training."""
