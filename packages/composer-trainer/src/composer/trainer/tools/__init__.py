"""What a trainer offers beside training: dry runs, and names of arguments in other libraries."""
