"""Programs for the command line."""

__all__: list[str] = []
