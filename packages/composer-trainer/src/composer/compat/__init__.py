"""The names of MosaicML Composer: former import paths, with warnings that contain the new ones.

This package is imported only after the import of a module or name below ``composer`` has failed.
``python -m composer.compat scan PATH`` lists what to change in a program.
"""

from composer.compat.scan import Finding, scan, scan_source
from composer.compat.schedules import lag_schedules
from composer.compat.table import Entry, entries
from composer.functional.signatures import unquote_annotations

__all__ = ["Entry", "Finding", "entries", "lag_schedules", "scan", "scan_source"]

unquote_annotations(globals())
