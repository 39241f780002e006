"""A folder becomes a bundle: the same files, the same bytes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tracelake.cli.bundles import zip_folder
from tracelake.cli.main import app
from tracelake.domain.bundles import check_zip
from tracelake.domain.errors import Invalid


def packed(folder: Path) -> bytes:
    into = io.BytesIO()
    zip_folder(folder, into)
    return into.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "function"
    (made / "lib").mkdir(parents=True)
    (made / "main.py").write_text("def handler(event, context): return 1\n")
    (made / "lib" / "part.py").write_text("x = 1\n")
    (made / "bootstrap").write_text("#!/bin/sh\n")
    (made / "bootstrap").chmod(0o700)
    return made


def test_the_same_files_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = packed(folder)
    os.utime(folder / "main.py", (0, 0))
    (folder / "main.py").chmod(0o600)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "main.pyc").write_bytes(b"x")
    os.rename(folder, tmp_path / "elsewhere")
    assert packed(tmp_path / "elsewhere") == first


def test_a_file_that_is_no_zip_is_refused_with_what_to_push(folder: Path) -> None:
    done = CliRunner().invoke(app, ["bundle", "push", str(folder / "main.py")])
    assert isinstance(done.exception, Invalid)
    assert done.exception.message.endswith(
        "is neither a folder nor a zip file: push the folder that it is in"
    )


def test_executable_files_stay_executable(folder: Path) -> None:
    found = check_zip(io.BytesIO(packed(folder)))
    assert found.names == ("bootstrap", "lib/part.py", "main.py")
    assert found.executables == {"bootstrap"}
    before = packed(folder)
    (folder / "bootstrap").chmod(0o600)
    assert packed(folder) != before


def test_a_link_inside_is_packed_as_its_file_and_one_that_leads_out_is_refused(folder: Path) -> None:
    (folder / "again.py").symlink_to("main.py")
    assert "again.py" in check_zip(io.BytesIO(packed(folder))).names
    (folder / "secrets").symlink_to("/etc")
    with pytest.raises(Invalid, match="secrets is a link"):
        packed(folder)
    (folder / "secrets").unlink()
    (folder / "lib" / "up").symlink_to(folder)
    with pytest.raises(Invalid, match="lib/up"):
        packed(folder)


def test_what_is_no_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(Invalid, match="pipe is neither"):
        packed(folder)
