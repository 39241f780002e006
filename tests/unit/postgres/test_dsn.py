"""A DSN with another login names the same database, whatever the password and the address are."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest
from psycopg.conninfo import conninfo_to_dict

from tracelake.postgres.dsn import with_login


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://owner:old@db.example:5432/name?sslmode=require&connect_timeout=5",
        "postgresql://owner:o@ld@db.example:5432/name?sslmode=require&connect_timeout=5",
        "postgresql://db.example:5432/name?user=owner&password=old&sslmode=require&connect_timeout=5",
        "postgresql://db.example:5432/name?passfile=%2Fkeys&sslmode=require&connect_timeout=5",
    ],
)
def test_only_the_login_changes(dsn: str) -> None:
    assert conninfo_to_dict(with_login(dsn, "tracelake_reader", "new")) == {
        "user": "tracelake_reader",
        "password": "new",
        "host": "db.example",
        "port": "5432",
        "dbname": "name",
        "sslmode": "require",
        "connect_timeout": "5",
    }


@pytest.mark.parametrize("password", ["a@b", "a/b?c#d", "%41", "a b", "a:b", "ä€"])
def test_a_password_may_hold_any_character(password: str) -> None:
    dsn = with_login("postgresql://127.0.0.1:1/name", "user@domain", password)
    assert conninfo_to_dict(dsn)["password"] == password
    assert conninfo_to_dict(dsn)["user"] == "user@domain"
    assert unquote(urlsplit(dsn).password or "") == password


def test_the_folder_of_a_socket_stays_as_it_was_written() -> None:
    dsn = with_login("postgresql:///name?host=%2Ftmp%2Fa%20b%2Bc&port=5432", "user", "x")
    assert conninfo_to_dict(dsn)["host"] == "/tmp/a b+c"


def test_another_address_takes_the_place_of_a_socket() -> None:
    dsn = with_login("postgresql:///name?host=%2Fsocket&port=5432", "user", "x", "127.0.0.1:6543")
    assert dsn == "postgresql://user:x@127.0.0.1:6543/name?sslmode=disable"


def test_another_address_keeps_the_chosen_encryption() -> None:
    dsn = with_login("postgresql://a:b@one:1/name?sslmode=require", "user", "x", "two:2")
    assert dsn == "postgresql://user:x@two:2/name?sslmode=require"
