"""Lets the tests of the hosts import ``comparison``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
