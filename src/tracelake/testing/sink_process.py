"""A real ``tracelake sink`` as a child process that a test may kill, stop, continue and start again."""

from __future__ import annotations

import sys

from tracelake.testing.worker_process import WorkerProcess


class SinkProcess(WorkerProcess):
    """``TRACELAKE_DATA_DSN`` is among its ``environment``."""

    def _argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tracelake", "sink", "--home", str(self.home)),
            *("--ready-file", str(self._ready_file), *self._options),
        ]
