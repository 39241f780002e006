"""Whether the parts of a stack on this machine run, each by its process, and whether queries are answered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from tracelake.cli.doctor_checks import Finding, Verdict

_QUERY_SECONDS = 5.0
_SUPERVISOR = "supervisor"


def check_parts(home: Path) -> Iterator[Finding]:
    """Nothing where no stack of this home says that it is up."""
    from tracelake.dev.handle import DEV_FILE, DevHandle, read_handle

    handle = read_handle(home / DEV_FILE, DevHandle)
    if handle is None:
        return
    gone = sorted(name for name, pid in handle.pids.items() if not _runs(pid))
    if _SUPERVISOR in gone:
        remedy = f"it was killed: tracelake dev --home {quote(str(home))} goes on where it was"
        yield Finding("parts", Verdict.FAILED, f"what kept the stack on {home} running is gone", remedy)
        return
    for name in gone:
        remedy = (
            f"it is started again by itself; why it ended: tracelake logs {name} --home {quote(str(home))}"
        )
        yield Finding("parts", Verdict.WARNING, f"{name} isn't running right now", remedy)
    if not gone:
        yield Finding("parts", Verdict.OK, f"{', '.join(sorted(handle.pids))} run")
    yield _query_service(handle.query_url, home)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _query_service(url: str, home: Path) -> Finding:
    import httpx

    remedy = f"tracelake logs query --home {quote(str(home))} tells more"
    try:
        answer = httpx.get(f"{url}/readyz", timeout=_QUERY_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        return Finding("query service", Verdict.WARNING, f"{url} doesn't answer: {error}", remedy)
    if answer.status_code != httpx.codes.OK:
        return Finding("query service", Verdict.WARNING, f"{url} isn't ready: {answer.text[:500]}", remedy)
    return Finding("query service", Verdict.OK, f"{url} is ready")
