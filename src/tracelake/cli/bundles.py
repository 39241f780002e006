"""``tracelake bundle``: pushes the code of functions, which is named by its hash.

A folder becomes a zip file, and the same files give the same bytes, hence the same bundle: entries stand in the
order of their names, with one date for all and only the executable bit of their modes. Files that interpreters and
tools leave behind (``__pycache__``, ``.git``) aren't part of a function. A link is packed as the file that it
points to, if that is inside the folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tracelake.cli.show import counted, print_fields, print_heading, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import Invalid, TooLarge

LEFT_OUT = frozenset(
    {"__pycache__", ".git", ".hg", ".svn", ".DS_Store", ".mypy_cache", ".pytest_cache", ".venv"}
)
# The first date that zip knows: with the time of the files, the same code would have other hashes.
_DATE = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


bundle_app = typer.Typer(help="The code of functions, for `runtime: lambda`.", no_args_is_help=True)


@bundle_app.command()
def push(
    path: Annotated[
        Path,
        typer.Argument(exists=True, help="A folder, or a zip file that is pushed as it is.", metavar="PATH"),
    ],
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Push a function's code, and print the reference that a DAG writes as udf.bundle.

    The reference is the hash of the zip file: pushing the same code twice is one bundle, and a bundle never
    changes. A folder is zipped the same way each time; executable files stay executable.

    Examples:

        tracelake bundle push ./my_function

        tracelake bundle push my_function.zip --json
    """
    from tracelake.domain.bundles import MAX_BUNDLE_BYTES, check_zip

    # A file that is too large is refused for that, whatever it is.
    small = path.is_file() and path.stat().st_size <= MAX_BUNDLE_BYTES
    if small and not zipfile.is_zipfile(path):
        raise Invalid(
            "InvalidBundle", f"{path} is neither a folder nor a zip file: push the folder that it is in"
        )
    with _as_zip(path) as file:
        if file.seek(0, 2) > MAX_BUNDLE_BYTES:
            raise TooLarge("TooLarge", f"{path} has more than {MAX_BUNDLE_BYTES // 2**20} MiB as a zip file")
        # Before the upload, though the Dispatcher checks it again.
        check_zip(file)
        with connect(url, token, home) as client:
            bundle, created = client.push_bundle(file)
    if as_json:
        print_json(
            {"bundle": bundle.bundle, "created": created, "files": bundle.files, "bytes": bundle.bytes}
        )
        return
    what = "pushed" if created else "this bundle was pushed before"
    typer.echo(f"{what}: {counted(bundle.files, 'file')}, {counted(bundle.bytes, 'byte')} zipped", err=True)
    typer.echo(bundle.bundle)


@bundle_app.command("list")
def list_bundles(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of bundles.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List bundles, newest first.

    Examples:

        tracelake bundle list

        tracelake bundle list --limit 100 --json
    """
    with connect(url, token, home) as client:
        page = client.bundles(limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    if not page.bundles:
        typer.echo("no bundles")
        return
    print_table(
        ("BUNDLE", "FILES", "BYTES", "UNPACKED", "BOOTSTRAP", "PUSHED BY", "CREATED"),
        [
            (b.bundle, b.files, b.bytes, b.unpacked_bytes, b.has_bootstrap, b.pushed_by, b.created_at)
            for b in page.bundles
        ],
    )
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)


@bundle_app.command()
def show(
    bundle: Annotated[str, typer.Argument(help="Its reference, sha256:…", metavar="BUNDLE")],
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a bundle with the names of its files.

    Examples:

        tracelake bundle show sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    """
    with connect(url, token, home) as client:
        found = client.bundle(bundle)
    if as_json:
        print_json(found)
        return
    print_fields(
        (
            ("bundle", found.bundle),
            ("bytes", found.bytes),
            ("unpacked", found.unpacked_bytes),
            ("bootstrap", found.has_bootstrap),
            ("pushed by", found.pushed_by),
            ("created", found.created_at),
        )
    )
    print_heading("files")
    print_table(("NAME",), [(name,) for name in found.names], indent=2)


@contextmanager
def _as_zip(path: Path) -> Iterator[BinaryIO]:
    if path.is_dir():
        with tempfile.TemporaryFile() as made:
            zip_folder(path, made)
            yield made
    else:
        with path.open("rb") as given:
            yield given


def zip_folder(folder: Path, into: BinaryIO) -> None:
    """Raises ``Invalid`` for entries that a bundle can't hold, ``OSError`` for those that can't be read."""
    root = folder.resolve()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        # The order of a folder's entries differs between machines.
        for name, path in sorted(_files(root, "", (root,))):
            entry = zipfile.ZipInfo(name, _DATE)
            executable = path.stat().st_mode & stat.S_IXUSR
            # Readers look for a Unix mode only in entries that Unix made.
            entry.create_system = _UNIX
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())


def _files(folder: Path, below: str, inside: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """``inside`` are the folders on the way down: a link back to one of them would never end."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = below + entry.name
            if entry.name in LEFT_OUT or entry.name.endswith(".pyc"):
                continue
            path = Path(entry.path).resolve()
            if not path.is_relative_to(inside[0]) or path in inside:
                raise Invalid(
                    "InvalidBundle", f"{name} is a link that leads out of the folder, or around in it"
                )
            if path.is_dir():
                yield from _files(path, f"{name}/", (*inside, path))
            elif path.is_file():
                yield name, path
            else:
                raise Invalid("InvalidBundle", f"{name} is neither a file nor a folder")
