"""What is wrong with stored blocks, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tracelake.domain.block_range import BlockRange


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Blocks ``start`` to ``end``, both inclusive, and what holds of all of them."""

    start: int
    end: int
    what: str

    def __str__(self) -> str:
        blocks = f"block {self.start}" if self.start == self.end else f"blocks {self.start} to {self.end}"
        return f"{blocks}: {self.what}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Neighbours with the same thing wrong become one."""
    result: list[Finding] = []
    for finding in sorted(findings, key=lambda found: (found.what, found.start, found.end)):
        last = result[-1] if result else None
        if last is not None and last.what == finding.what and finding.start <= last.end + 1:
            result[-1] = Finding(last.start, max(last.end, finding.end), last.what)
        else:
            result.append(finding)
    return sorted(result)


def ranges(findings: Iterable[Finding]) -> list[BlockRange]:
    """The blocks that anything is wrong with, as few ranges as possible."""
    result: list[BlockRange] = []
    for finding in sorted(findings):
        if result and finding.start <= result[-1].end + 1:
            result[-1] = BlockRange(result[-1].start, max(result[-1].end, finding.end))
        else:
            result.append(BlockRange(finding.start, finding.end))
    return result
