"""What the example job of ``sql_transform`` gives; Spark makes it, so a test runs it instead of the page."""

from __future__ import annotations

from tracelake.reference.example_rows import ExampleRows

SQL_RESULT = ExampleRows(
    ("block_number", "token", "transfers", "volume"),
    [
        ("2", "0x21807cee…", "1", "867366.0"),
        ("2", "0xd5899d87…", "1", "4.3349064522288373e+23"),
        ("3", "0x177e31f6…", "2", "2.263091869626433e+25"),
    ],
    0,
)
