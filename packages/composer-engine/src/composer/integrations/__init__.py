"""Algorithms in other libraries' trainers: one module each, which imports the library it is named after.

``lightning``, ``transformers``, ``accelerate`` and ``ignite``; ``composer-engine[lightning]`` installs the library for
the module of that name.
"""

__all__: list[str] = []
