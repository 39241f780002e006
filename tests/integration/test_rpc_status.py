"""``tracelake rpc status`` and ``doctor``: what people see of their endpoints, and never a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tracelake.cli.doctor_checks import Verdict
from tracelake.cli.doctor_rpc import check_rpc_pools
from tracelake.cli.main import app
from tracelake.dev.handle import DEV_FILE, DevHandle, write_handle
from tracelake.domain.errors import TracelakeError
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.testing.faulty_rpc import Fault, FaultyRpc

HEAD = 40
GONE = "http://127.0.0.1:9/v2/KEY-of-nobody"


@pytest.fixture(scope="module")
def node() -> Iterator[RunningChain]:
    with running(DevChain(seed=3, blocks=HEAD)) as chain:
        yield chain


def write(home: Path, **pools: dict[str, str]) -> Path:
    lines = []
    for name, endpoints in pools.items():
        for endpoint, url in endpoints.items():
            lines += [f"[[pools.{name}.endpoints]]", f'name = "{endpoint}"', f'url = "{url}"']
    file = home / "rpc.toml"
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    return file


def run(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["rpc", "status", *arguments], env={"COLUMNS": "200"})
    if isinstance(ended.exception, TracelakeError):
        raise ended.exception
    return ended.exit_code, ended.stdout


def test_every_endpoint_is_shown_as_it_is(tmp_path: Path, node: RunningChain) -> None:
    with FaultyRpc(node.url) as lagging, FaultyRpc(node.url) as elsewhere:
        lagging.lie(Fault.LAG, value=3)
        lagging.lie(Fault.NO_METHOD, method="eth_getBlockReceipts")
        lagging.lie(Fault.MAX_BATCH, value=30)
        elsewhere.lie(Fault.OTHER_CHAIN, value=7)
        urls = {
            "good": node.url,
            "lagging": f"{lagging.url}/KEY-of-it",
            "elsewhere": elsewhere.url,
            "gone": GONE,
        }
        write(tmp_path, main=urls)
        code, printed = run("--home", str(tmp_path), "--json")
        code_of_table, table = run("main", "--rpc-pools", str(tmp_path / "rpc.toml"))
    assert (code, code_of_table) == (0, 0)
    [pool] = json.loads(printed)["pools"]
    assert (pool["pool"], pool["chain_id"], pool["works"]) == ("main", node.chain.chain_id, True)
    good, late, other, gone = pool["endpoints"]
    assert (good["usable"], good["head"], good["lag"], good["batch"]) == (True, HEAD, 0, 100)
    assert (good["lacks"], good["problem"]) == ([], None)
    assert good["latency"] > 0
    assert (late["usable"], late["head"], late["lag"], late["batch"]) == (True, HEAD - 3, 3, 25)
    assert late["lacks"] == ["eth_getBlockReceipts"]
    assert (other["reachable"], other["usable"], other["chain_id"]) == (True, False, 7)
    assert other["problem"] == f"it is on chain 7, not on {node.chain.chain_id}"
    assert (gone["reachable"], gone["usable"], gone["problem"]) == (
        False,
        False,
        "can't connect: connection refused",
    )
    assert "KEY" not in printed + table
    assert table.split("\n")[1:3] == [
        f"main  (chain {node.chain.chain_id})",
        table.split("\n")[2],
    ]
    assert [line.split()[0] for line in table.split("\n")[2:7]] == ["endpoint", *urls]


def test_a_pool_without_an_endpoint_that_works_is_a_failure(tmp_path: Path, node: RunningChain) -> None:
    write(tmp_path, main={"good": node.url}, other={"gone": GONE})
    assert run("main", "--home", str(tmp_path))[0] == 0
    assert run("other", "--home", str(tmp_path))[0] == 1
    assert run("--home", str(tmp_path))[0] == 1


def test_what_cannot_be_shown_is_explained(tmp_path: Path, node: RunningChain) -> None:
    with pytest.raises(
        TracelakeError, match=r"there is no .*rpc\.toml: it says where chains are read from; `tracelake init`"
    ):
        run("--home", str(tmp_path))
    write(tmp_path, main={"good": node.url})
    with pytest.raises(TracelakeError, match="has no pool 'man': it has main"):
        run("man", "--home", str(tmp_path))
    write(tmp_path)
    with pytest.raises(TracelakeError, match="has no pools"):
        run("--home", str(tmp_path))


def test_the_file_of_the_running_stack_is_found(tmp_path: Path, node: RunningChain) -> None:
    """`tracelake dev --rpc-pools FILE` is how the examples begin."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file = write(elsewhere, main={"good": node.url})
    nowhere = dict.fromkeys(
        ("state_dsn", "data_dsn", "queue_dsn", "data_write_dsn", "data_read_dsn"),
        "postgresql:",
    )
    urls = dict.fromkeys(
        ("user_url", "internal_url", "query_url", "worker_token", "user_token", "object_root"), ""
    )
    handle = DevHandle(operators=(), rpc_pools=str(file), pids={}, **nowhere, **urls)
    write_handle(tmp_path / DEV_FILE, handle)
    assert run("main", "--home", str(tmp_path))[0] == 0
    assert [finding.verdict for finding in check_rpc_pools(tmp_path)] == [Verdict.OK]


def test_the_doctor_looks_at_the_file(tmp_path: Path) -> None:
    assert list(check_rpc_pools(tmp_path)) == []
    file = write(tmp_path, main={"gone": GONE})
    assert [finding.verdict for finding in check_rpc_pools(tmp_path)] == [Verdict.OK]
    file.chmod(0o644)
    assert [finding.verdict for finding in check_rpc_pools(tmp_path)] == [Verdict.WARNING]
    file.write_text("[pools.main]")
    [finding] = check_rpc_pools(tmp_path)
    assert finding.verdict is Verdict.FAILED
    assert "pools.main.endpoints" in finding.message
