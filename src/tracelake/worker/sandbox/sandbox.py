"""The way to run untrusted code: a sandbox that has been proved on this machine, or a refusal."""

from __future__ import annotations

import os

from tracelake.domain.errors import Unavailable
from tracelake.worker.sandbox.bubblewrap import Bubblewrap
from tracelake.worker.sandbox.cgroups import CgroupParent
from tracelake.worker.sandbox.check import SandboxReport, examine
from tracelake.worker.sandbox.process import SandboxedProcess
from tracelake.worker.sandbox.spec import SandboxSpec

# By process: a fork must prove it for itself.
_proved: dict[int, tuple[SandboxReport, CgroupParent | None]] = {}


class Sandbox:
    """``open`` it; there is no other way to get one, and so no way to start something without the proof."""

    def __init__(self, bubblewrap: Bubblewrap, report: SandboxReport) -> None:
        self._bubblewrap = bubblewrap
        self.report = report

    @classmethod
    async def check(cls) -> SandboxReport:
        """Look and try out; doesn't raise for what it finds."""
        report, _ = await examine()
        return report

    @classmethod
    async def open(cls) -> Sandbox:
        """Raises Unavailable, with what is missing and how to install it."""
        if os.getpid() not in _proved:
            report, parent = await examine()
            if not report.available:
                raise Unavailable("SandboxUnavailable", f"untrusted code can't be run here: {report}")
            _proved[os.getpid()] = (report, parent)
        report, parent = _proved[os.getpid()]
        if report.program is None:
            raise Unavailable("SandboxUnavailable", "untrusted code can't be run here: bubblewrap is missing")
        bubblewrap = Bubblewrap(report.program, parent)
        bubblewrap.prepare()
        return cls(bubblewrap, report)

    async def start(self, spec: SandboxSpec) -> SandboxedProcess:
        return await self._bubblewrap.start(spec)

    async def close(self) -> None:
        """End everything that still runs in it."""
        await self._bubblewrap.close()
