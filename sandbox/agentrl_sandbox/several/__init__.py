"""Several services as one sandbox."""
