"""``tracelake rpc``: checks the pools of JSON-RPC endpoints that chains are read from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.failures import ExitCode
from tracelake.cli.show import print_heading, print_json, print_table
from tracelake.cli.stack import DEFAULT_HOME, HomeOption, JsonOption
from tracelake.domain.errors import Invalid, NotFound

if TYPE_CHECKING:
    from tracelake.contracts.rpc_pool import PoolConfig
    from tracelake.evm.rpc.probe import EndpointReport, PoolReport

POOLS_FILE = "rpc.toml"
POOLS_VARIABLE = "TRACELAKE_RPC_POOLS"

rpc_app = typer.Typer(help="RPC pools: where chains are read from.", no_args_is_help=True)


@rpc_app.command()
def status(
    pool: Annotated[str | None, typer.Argument(help="One pool only.  [default: all of the file]")] = None,
    pools_file: Annotated[
        Path | None,
        typer.Option(
            "--rpc-pools",
            help=f"The file with the pools.  [default: {POOLS_VARIABLE}, what a running stack uses, "
            f"or HOME/{POOLS_FILE}]",
        ),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every endpoint of the pools.

    Shows whether it can be reached, its chain, its newest block and how far that is behind the others, how fast
    it answers, what it doesn't have, and how many calls it takes at once. Endpoints are compared at a block that
    all of them have, or that the pool's quorum has reached: one that has another block there doesn't agree. A few
    dozen calls are made to each. The exit code is 1 when a pool has no endpoint that works, or fewer that agree
    than its quorum.

    Examples:

        tracelake rpc status

        tracelake rpc status main --rpc-pools ./rpc.toml --json
    """
    from tracelake.evm.rpc.probe import probe_pool

    chosen = choose_pools(pool, pools_file_of(pools_file, home))
    reports = [probe_pool(config) for config in chosen]
    if as_json:
        print_json({"pools": [_as_json(report) for report in reports]})
    else:
        for report in reports:
            _show(report)
    if not all(report.works for report in reports):
        raise typer.Exit(ExitCode.FAILED)


def pools_file_of(given: Path | None, home: Path | None) -> Path:
    """The path of the pool file, whether it exists or not."""
    from tracelake.dev.handle import DevHandle
    from tracelake.stack_connection import DEV_FILE, read_handle

    if given is not None:
        return given
    place = (home or DEFAULT_HOME).absolute()
    named = os.environ.get(POOLS_VARIABLE)
    if not named and (stack := read_handle(place / DEV_FILE, DevHandle)) is not None:
        named = stack.rpc_pools
    return Path(named) if named else place / POOLS_FILE


def choose_pools(pool: str | None, file: Path) -> list[PoolConfig]:
    """The pool of this name, or all of the file."""
    from tracelake.evm.rpc.config import load_pools

    if not file.exists():
        raise NotFound(
            "NoRpcPools",
            f"there is no {file}: it names the endpoints that chains are read from; `tracelake init` writes one",
        )
    pools = load_pools(file)
    if not pools:
        raise Invalid("NoRpcPools", f"{file} has no pools: they are written as [pools.NAME]")
    if pool is None:
        return list(pools.values())
    if pool not in pools:
        raise NotFound("NoRpcPool", f"{file} has no pool {pool!r}: it has {', '.join(sorted(pools))}")
    return [pools[pool]]


def _show(report: PoolReport) -> None:
    chain = "an unknown chain" if report.chain_id is None else f"chain {report.chain_id}"
    quorum = f", quorum {report.quorum}" if report.quorum > 1 else ""
    print_heading(f"{report.pool}  ({chain}, profile {report.profile}{quorum})")
    columns = ("endpoint", "state", "head", "lag", "agrees", "latency", "batch", "lacks", "problem")
    print_table(columns, [_row(each) for each in report.endpoints])


def _row(report: EndpointReport) -> tuple[object, ...]:
    state = "ok" if report.usable else "not usable" if report.reachable else "not reachable"
    latency = None if report.latency is None else f"{report.latency * 1000:.0f} ms"
    lacks = ", ".join(report.lacks) or None
    agrees = None if report.agrees is None else "yes" if report.agrees else "no"
    return report.name, state, report.head, report.lag, agrees, latency, report.batch, lacks, report.problem


def _as_json(report: PoolReport) -> dict[str, object]:
    return {
        "pool": report.pool,
        "chain_id": report.chain_id,
        "profile": report.profile,
        "works": report.works,
        "quorum": report.quorum,
        "compared_at": report.compared_at,
        "endpoints": report.endpoints,
    }
