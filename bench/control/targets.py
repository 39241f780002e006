"""Targets of each workload, scaled by the reference line of the same run.

The figures were set for a machine whose Postgres does ``REFERENCE`` durable commits per second on one
connection; on another they shrink or grow with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REFERENCE = 3460.0
QUIET = 0.1
"""The part of the machine that others may use while a verdict still means something."""
UNCLEAR = "unclear: not a quiet machine"


@dataclass(frozen=True)
class Target:
    metric: str
    target: float
    moonshot: float
    lower_is_better: bool = False

    def judge(self, measured: float, reference: float, others_busy: float) -> dict[str, Any]:
        speed = reference / REFERENCE
        scale = 1 / speed if self.lower_is_better else speed
        return {
            "metric": self.metric,
            "measured": round(measured, 2),
            "target": self.target,
            "scaled_target": round(self.target * scale, 2),
            "verdict": self._verdict(measured, scale) if others_busy <= QUIET else UNCLEAR,
            "moonshot": self.moonshot,
            "scaled_moonshot": round(self.moonshot * scale, 2),
            "ratio_to_reference": round(measured / reference, 5),
        }

    def _verdict(self, measured: float, scale: float) -> str:
        for name, bound in (("moonshot", self.moonshot), ("reached", self.target)):
            if measured <= bound * scale if self.lower_is_better else measured >= bound * scale:
                return name
        return "missed"


TARGETS = {
    "W1": Target("median_ms", 25.0, 9.0, lower_is_better=True),
    "W2": Target("chains_per_second", 200.0, 520.0),
    "W3": Target("tasks_per_second", 1200.0, 3000.0),
}
FLAT_WITHIN = 1.3
"""W5: how much dearer the last size may be than the first."""
