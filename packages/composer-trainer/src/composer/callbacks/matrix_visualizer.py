"""Log confusion matrices as pictures."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from composer.core import Callback, Logger, State
from composer.loggers.images import draw_matrix
from composer.loggers.products import require_product


@attrs.define(eq=False)
class MatrixVisualizer(Callback):
    """Log each metric that is a square matrix, such as ``MulticlassConfusionMatrix``, as a picture after an evaluation.

    Its name is ``Images/eval/MulticlassConfusionMatrix``, and the metric's name is that of a table with the numbers, as
    W&B stores one value by name and step. Several matrices, such as those of ``MultilabelConfusionMatrix``, are several
    pictures.

    Args:
        class_names: Names of the rows and columns; their numbers if None.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> MatrixVisualizer(["cat", "dog"])
        MatrixVisualizer(class_names=['cat', 'dog'])
    """

    class_names: Sequence[str] | None = None

    def __attrs_post_init__(self) -> None:
        require_product("matplotlib", "plot")

    def eval_end(self, state: State, logger: Logger) -> None:
        """Log the matrices of the evaluator."""
        label = str(state.dataloader_label)
        for name, value in state.eval_metric_values.get(label, {}).items() if logger.destinations else ():
            if isinstance(value, Tensor) and value.ndim in {2, 3} and value.shape[-1] == value.shape[-2] > 1:
                pictures = [draw_matrix(one, self.class_names) for one in value.view(-1, *value.shape[-2:])]
                logger.log_images(pictures, f"Images/{label}/{name}", channels_last=True)
