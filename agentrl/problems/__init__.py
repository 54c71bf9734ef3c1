"""Problems and demonstrations: generation, loading, mixtures, splits and order. Does not import torch."""
