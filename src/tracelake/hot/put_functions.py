"""Applies the functions of the data database from ``functions/*.sql``, once for every change of those files.

Each file defines functions by ``CREATE OR REPLACE``, with ``SET search_path`` in the definition, because replacing
a function drops the settings that it had. A function whose arguments or result change, or that is no longer needed,
is dropped first by a ``DROP FUNCTION IF EXISTS`` with its old signature, in the same file.

All files together have one hash. An install applies them if that hash is not the last one recorded, in one
transaction with the grants: PUBLIC must not be able to execute a new function for even a moment. A hash that was
recorded and then followed by another one belongs to an older version of this code, which is refused, as it is by
migrations. A set that goes back to an earlier text therefore needs a changed comment.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

import asyncpg

from tracelake.domain.errors import Conflict
from tracelake.postgres import sqlfiles

_SQL = sqlfiles.load("tracelake.hot", "sql/functions.sql")


def function_files() -> dict[str, str]:
    """File name to text, in the order of names."""
    folder = resources.files("tracelake.hot.functions")
    found = {e.name: e.read_text(encoding="utf-8") for e in folder.iterdir() if e.name.endswith(".sql")}
    return dict(sorted(found.items()))


async def put_functions(connection: asyncpg.Connection[Any]) -> bool:
    """Whether they had to be applied. For a transaction that holds off other installers, and grants afterwards."""
    files = function_files()
    # With names and separators, so that moving text between files changes the hash.
    sha256 = hashlib.sha256("\0".join(part for file in files.items() for part in file).encode()).hexdigest()
    applied = [row["sha256"] for row in await connection.fetch(_SQL.applied)]
    if applied[-1:] == [sha256]:
        return False
    # Two versions of this code would otherwise replace each other's functions in turn.
    if sha256 in applied:
        raise Conflict(
            "SchemaTooNew",
            "the functions of the data database are those of a later version of tracelake: upgrade tracelake or "
            "restore a backup",
        )
    try:
        for text in files.values():
            await connection.execute(text)
    except asyncpg.InsufficientPrivilegeError as error:
        raise Conflict(
            "CantPutFunctions",
            f"the installing role can't replace the functions of the data database ({error}): let a superuser run "
            "GRANT USAGE ON LANGUAGE plpgsql, sql TO it, and install again",
        ) from None
    await connection.execute(_SQL.fix_search_path)
    await connection.execute(_SQL.record, sha256)
    return True
