"""``python -m benchmarks.save``."""

from __future__ import annotations

import sys

from benchmarks.load import find_failures
from benchmarks.save.command import main

if __name__ == "__main__":
    sys.exit("\n".join(find_failures(main())) or None)
