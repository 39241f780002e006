"""Workers, sinks and Query Services: where they learn how to reach the stack, and what they say when they can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracelake.cli.service import ALIASES, CATALOG_DSN, INTERNAL_URL, ServiceConnection, given, operators_at
from tracelake.cli.sink import REQUIRED
from tracelake.dev.handle import DevHandle, write_handle
from tracelake.domain.errors import Unavailable
from tracelake.settings import Secret
from tracelake.stack_connection import DEV_FILE

GIVEN = {
    "TRACELAKE_INTERNAL_URL": "http://127.0.0.1:1",
    "TRACELAKE_WORKER_TOKEN": "a-worker-token",
    "TRACELAKE_QUEUE_DSN": "postgresql://queue",
    "TRACELAKE_DATA_WRITE_DSN": "postgresql://data",
}


def a_handle(home: Path) -> DevHandle:
    return DevHandle(
        user_url="http://127.0.0.1:1",
        internal_url="http://127.0.0.1:2",
        query_url="http://127.0.0.1:3",
        worker_token="the-stacks-token",
        user_token="token",
        state_dsn="postgresql://owner:x@127.0.0.1:4/state",
        data_owner_dsn="postgresql://owner",
        queue_dsn="postgresql://queue-of-the-stack",
        data_write_dsn="postgresql://writer-of-the-stack",
        data_read_dsn="postgresql://reader-of-the-stack",
        object_root=str(home / "objects"),
        operators=("my_operators",),
        pids={},
    )


def test_what_the_environment_says_is_taken_out_of_it(tmp_path: Path) -> None:
    environment = {**GIVEN, "TRACELAKE_OBJECTS": "file:///srv/objects", "PATH": "/bin"}
    connection = ServiceConnection.from_env_or_home(tmp_path, environment, REQUIRED)
    assert environment == {"PATH": "/bin"}
    assert (connection.internal_url, connection.objects) == ("http://127.0.0.1:1", "file:///srv/objects")
    assert given(connection.data_write_dsn).reveal() == "postgresql://data"
    assert connection.data_read_dsn is None
    assert "a-worker-token" not in repr(connection)
    assert "postgresql" not in repr(connection)


def test_logins_that_a_command_does_not_use_are_taken_out_as_well(tmp_path: Path) -> None:
    unused = dict.fromkeys(
        (
            "TRACELAKE_DATA_READ_DSN",
            "TRACELAKE_READING_DSN",
            "TRACELAKE_DATA_DSN",
            "TRACELAKE_STAGING_DSN",
            "TRACELAKE_CATALOG_DSN",
            "TRACELAKE_AUDIT_DSN",
        ),
        "postgresql://another",
    )
    environment = {**GIVEN, **unused, "PATH": "/bin"}
    connection = ServiceConnection.from_env_or_home(tmp_path, environment, REQUIRED)
    assert environment == {"PATH": "/bin"}
    assert given(connection.data_write_dsn).reveal() == "postgresql://data"


@pytest.mark.parametrize(("name", "former"), ALIASES.items())
def test_a_former_name_of_a_variable_goes_on_working(tmp_path: Path, name: str, former: str) -> None:
    places = {"TRACELAKE_OBJECTS": "objects", "TRACELAKE_DATA_WRITE_DSN": "data_write_dsn"}
    environment = {**GIVEN, former: "/by/its/former/name"}
    environment.pop(name, None)
    connection = ServiceConnection.from_env_or_home(tmp_path, environment, REQUIRED)
    found = getattr(connection, places.get(name, "data_read_dsn"))
    assert not environment
    assert (found.reveal() if isinstance(found, Secret) else found).removeprefix(
        "file://"
    ) == "/by/its/former/name"


@pytest.mark.parametrize(
    ("given_as", "meant"),
    [
        ("/srv/objects", "file:///srv/objects"),
        ("file:///a b", "file:///a b"),
        ("s3://bucket/x/", "s3://bucket/x/"),
    ],
)
def test_a_path_of_objects_is_the_address_of_a_folder(tmp_path: Path, given_as: str, meant: str) -> None:
    environment = {**GIVEN, "TRACELAKE_OBJECTS": given_as}
    assert ServiceConnection.from_env_or_home(tmp_path, environment, REQUIRED).objects == meant


def test_without_a_stack_it_says_what_is_missing(tmp_path: Path) -> None:
    environment = {name: value for name, value in GIVEN.items() if name != "TRACELAKE_DATA_WRITE_DSN"}
    with pytest.raises(Unavailable) as refused:
        ServiceConnection.from_env_or_home(tmp_path, environment, REQUIRED)
    assert "tracelake dev" in refused.value.message
    assert refused.value.message.endswith("with TRACELAKE_DATA_WRITE_DSN")
    assert not environment


def test_all_comes_from_the_stack_on_the_home_where_the_environment_lacks_one(tmp_path: Path) -> None:
    write_handle(tmp_path / DEV_FILE, a_handle(tmp_path))
    environment = {"TRACELAKE_INTERNAL_URL": "http://elsewhere", "TRACELAKE_DATA_ADDRESS": "elsewhere:1"}
    connection = ServiceConnection.from_env_or_home(tmp_path, environment, REQUIRED)
    assert not environment
    assert connection.internal_url == "http://127.0.0.1:2"
    assert given(connection.worker_token).reveal() == "the-stacks-token"
    assert given(connection.data_write_dsn).reveal() == "postgresql://writer-of-the-stack"
    assert connection.data_address is None
    assert connection.objects == f"file://{tmp_path}/objects"
    assert connection.operators == ("my_operators",)


def test_the_logins_of_queries_come_with_the_homes_own_passwords(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    write_handle(tmp_path / DEV_FILE, a_handle(tmp_path))
    connection = ServiceConnection.from_env_or_home(tmp_path, {}, (CATALOG_DSN,))
    assert given(connection.catalog_dsn).reveal().startswith("postgresql://tracelake_catalog:")
    assert given(connection.audit_dsn).reveal().endswith("@127.0.0.1:4/state")
    without = ServiceConnection.from_env_or_home(tmp_path, {}, (INTERNAL_URL,))
    assert without.catalog_dsn is None


def test_files_with_operators_are_named_by_their_full_path(tmp_path: Path) -> None:
    assert operators_at("my_company.operators") == "my_company.operators"
    assert operators_at("./extra.py") == str(Path.cwd() / "extra.py")
    assert operators_at(str(tmp_path)) == str(tmp_path)
