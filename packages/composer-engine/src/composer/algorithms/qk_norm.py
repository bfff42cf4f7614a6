"""QKNorm: normalize the queries and keys of each head."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import number
from composer.core.declarations import owned


@attrs.define(eq=False)
class QKNorm(ModelSurgery):
    """Normalize the queries and keys of each head in a decoder (arXiv:2010.04245).

    See :func:`composer.functional.apply_qk_norm`.

    Args:
        eps: What is added to the mean square.
        layout: The layers of your own attention; None for those of Transformers.

    Raises:
        TypeError: ``eps`` is not a number.
        ValueError: ``eps`` is not positive; or, when the model is changed, no attention is found.

    Example:
        >>> QKNorm()
        QKNorm(eps=1e-06)
    """

    eps: float = number(1e-6, 0, above=True, meaning="It is added to a mean square.")
    layout: cf.AttentionLayout | None = attrs.field(default=None, repr=False, kw_only=True)

    _kernel: ClassVar = staticmethod(cf.apply_qk_norm)
    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    owns: ClassVar = owned("the queries and keys", "Choose one eps.")
    found_nothing: ClassVar = "the queries of {model} have been normalized before. Remove it."
