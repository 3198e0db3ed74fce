"""Updates that chips share: each updates a piece of the parameters."""
