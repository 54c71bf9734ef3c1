"""Problems and demonstrations: generate, load, mix, split and order them. No torch here."""
