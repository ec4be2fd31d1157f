"""``python -m specmeter`` is the same as the ``specmeter`` command."""

from __future__ import annotations

import sys

from specmeter.cli import main

sys.exit(main())
