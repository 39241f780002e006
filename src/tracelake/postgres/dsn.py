"""DSNs of Postgres as URLs: the same database by another login."""

from __future__ import annotations

from urllib.parse import quote, unquote, urlsplit, urlunsplit

_OF_A_LOGIN = frozenset({"user", "password", "passfile"})
_OF_AN_ADDRESS = frozenset({"host", "hostaddr", "port"})


def with_login(dsn: str, user: str, password: str, address: str | None = None) -> str:
    """The same server and database by this login, without the former one's credentials. ``address`` is where the
    login's user reaches the server, as ``host:port``, when that isn't where the DSN says."""
    parts = urlsplit(dsn)
    dropped = _OF_A_LOGIN if address is None else _OF_A_LOGIN | _OF_AN_ADDRESS
    # As written: libpq and asyncpg decode some characters differently.
    kept = [each for each in parts.query.split("&") if each and _name(each) not in dropped]
    if address is not None and "sslmode" not in map(_name, kept):
        kept.append("sslmode=disable")
    # The last @: a password may contain one.
    server = address or parts.netloc.rpartition("@")[2]
    # A password may contain any character that a URL gives a meaning to.
    netloc = f"{quote(user, '')}:{quote(password, '')}@{server}"
    return urlunsplit(parts._replace(netloc=netloc, query="&".join(kept)))


def _name(parameter: str) -> str:
    return unquote(parameter.partition("=")[0])
