"""What users say about a job, and what is wrong with it."""
