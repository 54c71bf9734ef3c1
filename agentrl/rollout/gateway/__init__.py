"""The gateway: agent programs of any kind, trained with the exact tokens that were sampled for them."""
