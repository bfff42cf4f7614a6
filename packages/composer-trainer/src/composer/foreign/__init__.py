"""Files and settings of other libraries: weights, checkpoints of MosaicML Composer, and its settings of FSDP1."""

from composer.foreign.files import ForeignFile
from composer.foreign.torch_files import load_torch_weights
from composer.functional.signatures import unquote_annotations

__all__ = ["ForeignFile", "load_torch_weights"]

unquote_annotations(globals())
