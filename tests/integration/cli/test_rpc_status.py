"""``tracelake rpc status`` and ``doctor``: what people see of their endpoints, and never a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.faulty_rpc import Fault, FaultyRpc
from tracelake.cli.doctor import Verdict, check_rpc_pools
from tracelake.cli.main import app
from tracelake.dev.handle import DevHandle, write_handle
from tracelake.domain.errors import TracelakeError
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.stack_connection import DEV_FILE

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
    assert pool["profile"] == "ethereum"
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
        f"main  (chain {node.chain.chain_id}, profile ethereum)",
        table.split("\n")[2],
    ]
    assert [line.split()[0] for line in table.split("\n")[2:7]] == ["endpoint", *urls]


def test_endpoints_that_do_not_agree_are_shown_and_a_quorum_needs_those_that_do(
    tmp_path: Path, node: RunningChain
) -> None:
    forked = DevChain(seed=3, blocks=HEAD)
    forked.reorg(5, 7)
    with running(forked) as liar, FaultyRpc(node.url) as second:
        urls = {"good": node.url, "second": second.url, "liar": liar.url}
        file = write(tmp_path, main=urls)
        file.write_text("[pools.main]\nquorum = 2\n" + file.read_text())
        code, printed = run("--home", str(tmp_path), "--json")
        [pool] = json.loads(printed)["pools"]
        assert (code, pool["works"], pool["quorum"], pool["compared_at"]) == (0, True, 2, HEAD)
        assert [each["agrees"] for each in pool["endpoints"]] == [True, True, False]
        assert f"it has another block {HEAD}: 0x" in pool["endpoints"][2]["problem"]
        file.write_text(file.read_text().replace("quorum = 2", "quorum = 3"))
        code, table = run("--home", str(tmp_path))
    assert code == 1
    assert "quorum 3" in table
    assert [line.split()[4] for line in table.splitlines()[3:6]] == ["no", "no", "no"]


def test_a_pool_without_an_endpoint_that_works_is_a_failure(tmp_path: Path, node: RunningChain) -> None:
    write(tmp_path, main={"good": node.url}, other={"gone": GONE})
    assert run("main", "--home", str(tmp_path))[0] == 0
    assert run("other", "--home", str(tmp_path))[0] == 1
    assert run("--home", str(tmp_path))[0] == 1


def test_what_cannot_be_shown_is_explained(tmp_path: Path, node: RunningChain) -> None:
    with pytest.raises(
        TracelakeError,
        match=r"there is no .*rpc\.toml: it names the endpoints that chains are read from; `tracelake init`",
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
        ("state_dsn", "data_owner_dsn", "queue_dsn", "data_write_dsn", "data_read_dsn"),
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
