"""The highest numbers that people may type, where no other part declares them. ``--help`` shows each."""

from __future__ import annotations

HIGHEST_ID = 2**63 - 1
HIGHEST_VERSION = 2**31 - 1
HIGHEST_ATTEMPT = 2**31 - 1
MOST_LINES = 10_000_000
MOST_ROWS = 2**31 - 1
MAX_CHUNK = 1_000_000_000
LONGEST_SECONDS = 365 * 24 * 3600
