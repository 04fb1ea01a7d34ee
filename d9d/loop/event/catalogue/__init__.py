"""All events of the loops and what their handlers are given. Import from `common`, `train` and `inference`."""
