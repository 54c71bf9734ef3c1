"""Problems and demonstrations: generation, loading, mixtures, splits and order. Imports no torch."""
