"""Building blocks of models. Each runs on one device; parallelism is set on them from outside."""
