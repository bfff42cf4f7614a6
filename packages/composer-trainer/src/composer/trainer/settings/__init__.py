"""The arguments of a trainer in groups, each of which checks its own."""
