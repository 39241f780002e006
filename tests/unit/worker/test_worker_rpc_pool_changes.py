"""When a source that runs has to begin again because its endpoints were changed, and when it hasn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracelake.worker.rpc_pools import RpcPools

CONFIG = {"rpc_pool": "main"}


def endpoint(port: int) -> str:
    return f'[[pools.main.endpoints]]\nurl = "http://127.0.0.1:{port}"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rpc.toml"
    path.write_text(endpoint(1))
    path.chmod(0o600)
    return path


def test_another_endpoint_is_a_change_and_the_same_one_written_again_is_none(file: Path) -> None:
    pools = RpcPools(file)
    given = pools.for_job(CONFIG).pool
    file.write_text("# moved here\n" + endpoint(1))
    assert not pools.has_changed(CONFIG, given)
    file.write_text(endpoint(2))
    assert pools.has_changed(CONFIG, given)


@pytest.mark.parametrize(
    "text", ["[[pools.main", "", '[[pools.other.endpoints]]\nurl = "http://127.0.0.1:3"\n']
)
def test_a_file_that_cannot_be_used_changes_nothing(file: Path, text: str) -> None:
    pools = RpcPools(file)
    given = pools.for_job(CONFIG).pool
    file.write_text(text)
    assert not pools.has_changed(CONFIG, given)
    file.unlink()
    assert not pools.has_changed(CONFIG, given)


def test_an_attempt_that_has_not_been_given_its_pool_yet_begins_with_the_new_one(file: Path) -> None:
    assert not RpcPools(file).has_changed(CONFIG, None)
