"""Predicates with literals that a column can't hold: beyond its digits, its range or what an engine can write.

``d`` is a decimal with a scale of 2, ``at`` an instant.
"""

from __future__ import annotations

EXTREME_PREDICATES = (
    *("d = 1e-299", "d > 1e-50", "d <= -1e-50", "d > 1e77", "d <= -1e77", "d <> 1e77"),
    *("d = 1.505", "d <> 1.505", "d < 1.505", "d <= 1.495", "d > 1.495", "d >= 1.505"),
    *("at > '2020-01-01T00:00:00+16:00'", "at < '2024-01-02T00:00:00+23:59'"),
    *("at >= '2024-01-02T00:00:00+05:30:15.5'", "at <> '2024-01-01T00:00:00-23:59:59.999999'"),
    *("at > '0001-01-01T00:00:00+14:00'", "at < '9999-12-31T23:59:59-14:00'"),
    *("at < '0001-01-01T00:00:00+14:00'", "at = '9999-12-31T23:59:59.999999-14:00'"),
)
