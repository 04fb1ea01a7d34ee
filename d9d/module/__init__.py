"""Building blocks of models, and their parallelism."""
