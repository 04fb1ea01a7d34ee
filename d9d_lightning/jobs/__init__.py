"""The processes of a job: how they start, and how they end together."""
