"""Problems and demonstrations: generate, load, mix, split and order them. Imports no torch."""
