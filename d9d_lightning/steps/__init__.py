"""How the steps of a run are driven."""
