"""The gateway: trains agent programs on the exact tokens that were sampled for them."""
