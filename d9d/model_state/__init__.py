"""Exchange of weights with other tools."""
