"""Log calls over microbatches and stages."""
