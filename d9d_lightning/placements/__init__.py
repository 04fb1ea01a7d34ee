"""Where the parameters of a module are."""
