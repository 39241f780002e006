"""rpc.toml: what it may say, what is wrong with it and where, and that no key of it is ever shown."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.rpc.config import load_pools, parse_address, parse_pools, pool_of
from tracelake.operators.context import missing_pool
from tracelake.worker.attempt_log import Redaction
from tracelake.worker.rpc_pools import RpcPools

WHOLE = """
[pools.main]
chain_id = 143
deadline_seconds = 30

[[pools.main.endpoints]]
name = "alpha"
url = "https://alpha.example/v2/KEY-of-alpha-1?token=TOKEN-of-alpha"
headers = { Authorization = "Bearer HEADER-of-alpha" }
requests_per_second = 50
max_batch = 20
max_concurrency = 3
timeout_seconds = 5

[[pools.main.endpoints]]
url_env = "BETA_URL"

[[pools.main.endpoints]]
url = "https://user:PASSWORD-of-gamma@beta.example/"

[pools.local]
endpoints = [{ url = "http://127.0.0.1:8545" }]
"""
BETA = "https://beta.example/rpc/KEY-of-beta-2"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_pool_is_what_the_file_says_with_defaults_for_the_rest(tmp_path: Path) -> None:
    pools = load_pools(write(tmp_path / "rpc.toml", WHOLE), {"BETA_URL": BETA})
    assert list(pools) == ["main", "local"]
    main = pools["main"]
    assert (main.name, main.chain_id, main.deadline_seconds) == ("main", 143, 30)
    alpha, beta, gamma = main.endpoints
    assert (alpha.name, alpha.requests_per_second, alpha.max_batch) == ("alpha", 50, 20)
    assert (alpha.max_concurrency, alpha.timeout_seconds) == (3, 5)
    assert alpha.headers == {"Authorization": "Bearer HEADER-of-alpha"}
    assert (beta.name, beta.url, beta.requests_per_second) == ("beta.example", BETA, None)
    assert (beta.max_batch, beta.max_concurrency, beta.timeout_seconds) == (100, 8, 20)
    assert gamma.name == "beta.example-2"
    assert pools["local"].chain_id is None
    assert pools["local"].endpoints[0].name == "127.0.0.1:8545"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools = 3", r"rpc\.toml: pools: pools are written as \[pools.NAME\]"),
        ("[main]\nchain_id = 1", "rpc.toml: main: unknown"),
        ("[pools.a", "isn't TOML"),
        ("[pools.a]\nchains = 1", r"pools\.a: Object contains unknown field `chains`"),
        ("[pools.a]\nchain = 1", r"pools\.a\.chain: Expected `str \| null`"),
        (
            "[pools.a]\nchain = 'etherium'\n[[pools.a.endpoints]]\nurl = 'http://a'",
            r"pools\.a\.chain: no such chain profile; there are ethereum, optimism, base",
        ),
        ("[pools.a]\nchain_id = 1", r"pools\.a\.endpoints: a pool needs at least one endpoint"),
        ("[pools.a]\nchain_id = 0", r"pools\.a\.chain_id: Expected `int` >= 1"),
        (
            "[pools.a]\nquorum = 2\nendpoints = [{ url = 'http://x' }]",
            r"pools\.a\.quorum: 2 endpoints can't agree in a pool of 1",
        ),
        ("[pools.a]\nquorum = 0\nendpoints = [{ url = 'http://x' }]", r"quorum: Expected `int` >= 1"),
        ("[pools.'a b']\nendpoints = [{ url = 'http://x' }]", "a pool's name is letters"),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\nkey = 1",
            r"endpoints\[0\]: Object contains unknown field `key`",
        ),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\nmax_batch = 0",
            r"endpoints\[0\]\.max_batch: Expected `int` >= 1",
        ),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\ntimeout_seconds = 'no'",
            r"timeout_seconds: Expected `float`",
        ),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\nheaders = { Host = 'x' }",
            "Host is set by the client itself",
        ),
        ("[[pools.a.endpoints]]\nurl = 'http://x'\nheaders = { 'a b' = 'x' }", r"endpoints\[0\]\.headers"),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\nheaders = { A = \"x\\r\\ny\" }",
            r"endpoints\[0\]\.headers",
        ),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\nheaders = { A = \"x\\n\" }",
            r"endpoints\[0\]\.headers",
        ),
        (
            "[[pools.a.endpoints]]\nurl = 'http://x'\nheaders = { \"A\\n\" = 'x' }",
            r"endpoints\[0\]\.headers",
        ),
        ("[[pools.a.endpoints]]\nname = 'x'", r"endpoints\[0\]\.url: give url, or url_env"),
        ("[[pools.a.endpoints]]\nurl = 'http://x'\nurl_env = 'X'", "give url, or url_env"),
        (
            "[[pools.a.endpoints]]\nurl_env = 'NOT_SET'",
            r"endpoints\[0\]\.url_env: the variable NOT_SET isn't set",
        ),
        ("[[pools.a.endpoints]]\nurl = 'ws://SECRET'", r"url: an address begins with http:// or https://"),
        ("[[pools.a.endpoints]]\nurl = 'http://'", "an address needs a host"),
        ("[[pools.a.endpoints]]\nurl = 'http://x:99999/SECRET'", "its host or port can't be read"),
        ("[[pools.a.endpoints]]\nurl = 'http://x/SECRET y'", "plain ASCII without spaces"),
        ("[[pools.a.endpoints]]\nurl = 'http://x/#SECRET'", "no #fragment"),
        (
            "[pools.a]\nendpoints = [{ url = 'http://x/SECRET' }, { url = 'http://x/SECRET' }]",
            r"endpoints\[1\]\.url: the same as that of endpoint 0",
        ),
        (
            "[pools.a]\nendpoints = [{ name = 'n', url = 'http://x' }, { name = 'n', url = 'http://y' }]",
            r"endpoints\[1\]\.name: 'n' is the name of endpoint 0 already",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_field_and_without_the_value(text: str, said: str) -> None:
    with pytest.raises(Invalid, match=said) as refused:
        parse_pools(text.encode(), "rpc.toml", {})
    assert "SECRET" not in refused.value.message


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        load_pools(tmp_path / "rpc.toml")
    with pytest.raises(Invalid, match="isn't UTF-8"):
        parse_pools(b"\xff\xfe", "rpc.toml", {})


def test_keys_are_shown_by_nothing_that_shows_a_pool() -> None:
    main = parse_pools(WHOLE.encode(), "rpc.toml", {"BETA_URL": BETA})["main"]
    shown = (
        f"{main!r} {main} {main.endpoints!r} {main.__rich_repr__()} {parse_address(main.endpoints[0].url)!r}"
    )
    assert "alpha" in shown
    assert "-of-" not in shown


@pytest.mark.parametrize(
    "quoted",
    [
        BETA,
        "POST /rpc/KEY-of-beta-2 failed",
        "the key KEY-of-alpha-1 isn't known",
        "TOKEN-of-alpha",
        "HEADER-of-alpha",
        "PASSWORD-of-gamma",
    ],
)
def test_a_key_is_taken_out_of_logs_whatever_part_of_it_is_quoted(quoted: str) -> None:
    main = parse_pools(WHOLE.encode(), "rpc.toml", {"BETA_URL": BETA})["main"]
    assert "-of-" not in Redaction(main.secrets()).text(f"it said {quoted}!")


def test_a_pool_without_keys_hides_nothing() -> None:
    assert pool_of("http://127.0.0.1:8545").secrets() == []


def test_a_pool_travels_as_json_and_as_a_pickle() -> None:
    pool = pool_of("http://x/KEY", chain_id=5, deadline_seconds=2, max_batch=7)
    assert msgspec.json.decode(msgspec.json.encode(pool), type=PoolConfig) == pool
    assert pickle.loads(pickle.dumps(pool)) == pool
    assert (pool.endpoints[0].max_batch, pool.deadline_seconds) == (7, 2)


def test_a_job_is_given_the_pool_that_it_names_and_no_other(tmp_path: Path) -> None:
    environment = {"BETA_URL": BETA, "PATH": "/bin"}
    pools = RpcPools(write(tmp_path / "rpc.toml", WHOLE), environment)
    assert environment == {"PATH": "/bin"}
    given = pools.for_job({"rpc_pool": "local"})
    assert given.pool is not None
    assert [given.pool.name, given.known] == ["local", ("main", "local")]
    assert pools.for_job({}).pool is None
    assert pools.for_job({"rpc_pool": "other"}).pool is None
    assert pools.for_job({"rpc_pool": ["main"]}).pool is None


def test_a_file_is_read_again_when_it_has_changed_and_may_come_later(tmp_path: Path) -> None:
    file = tmp_path / "rpc.toml"
    environment = {"BETA_URL": BETA}
    pools = RpcPools(file, environment, required=False)
    assert pools.for_job({"rpc_pool": "main"}).known == ()
    write(file, WHOLE)
    assert pools.for_job({"rpc_pool": "main"}).pool is not None
    write(file, WHOLE.replace("chain_id = 143", "chain_id = 144"))
    changed = pools.for_job({"rpc_pool": "main"}).pool
    assert changed is not None
    assert (changed.chain_id, changed.endpoints[1].url) == (144, BETA)
    write(file, "[pools.main]\n")
    with pytest.raises(Invalid, match="needs at least one endpoint"):
        pools.for_job({"rpc_pool": "main"})


def test_a_file_that_was_named_must_be_there_and_one_that_others_can_read_is_remarked(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"there is no .*rpc\.toml"):
        RpcPools(tmp_path / "rpc.toml")
    write(tmp_path / "rpc.toml", "[pools]").chmod(0o644)
    with capture_logs() as logs:
        RpcPools(tmp_path / "rpc.toml")
    assert [entry["event"] for entry in logs] == ["rpc_pools_exposed"]


def test_a_pool_that_is_not_there_is_explained_with_those_that_are() -> None:
    said = missing_pool("man", ["other", "main"]).message
    assert "no RPC pool 'man': configured pools: main, other; add [pools.man] to its rpc.toml" in said
    assert "the worker has no pools; write rpc.toml" in missing_pool("main", []).message
    assert "names no RPC pool: add rpc_pool" in missing_pool(None, ["main"]).message
    assert "is the name of a pool, not 7" in missing_pool(7, ["main"]).message
