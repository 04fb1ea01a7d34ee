"""How the ranks of a job end together: who has failed, why, and where everybody was."""
