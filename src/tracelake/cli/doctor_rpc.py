"""Whether the file with the RPC pools can be used; whether endpoints answer, ``tracelake rpc status`` tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tracelake.cli.doctor_checks import Finding, Verdict
from tracelake.cli.rpc_commands import pools_file_of
from tracelake.domain.errors import TracelakeError


def check_rpc_pools(home: Path) -> Iterator[Finding]:
    """Who reads no chain needs no file."""
    from tracelake.evm.rpc.config import load_pools

    file = pools_file_of(None, home)
    if not file.exists():
        return
    try:
        pools = load_pools(file)
    except TracelakeError as error:
        yield Finding(
            "rpc pools", Verdict.FAILED, error.message, "`tracelake init DIR` writes one that works"
        )
        return
    said = f"{', '.join(sorted(pools)) or 'none'} in {file}"
    if file.stat().st_mode & 0o077:
        yield Finding("rpc pools", Verdict.WARNING, f"{said}, which others can read", f"chmod 600 {file}")
    else:
        yield Finding("rpc pools", Verdict.OK, f"{said}; `tracelake rpc status` asks their endpoints")
