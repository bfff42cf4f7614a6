"""What a trainer offers beside training: summaries, a search for a learning rate, dry runs and names of arguments."""
