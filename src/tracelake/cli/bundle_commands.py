"""``tracelake bundle``: the code of functions, pushed once and named by its hash."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tracelake.cli.show import counted, print_fields, print_heading, print_json, print_table
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect
from tracelake.domain.errors import TooLarge

bundle_app = typer.Typer(help="The code of functions, for `runtime: lambda`.", no_args_is_help=True)


@bundle_app.command()
def push(
    path: Annotated[
        Path,
        typer.Argument(exists=True, help="A folder, or a zip file that is taken as it is.", metavar="PATH"),
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
    from tracelake.domain.bundle_zip import MAX_BUNDLE_BYTES, check_zip

    with _as_zip(path) as file:
        if file.seek(0, 2) > MAX_BUNDLE_BYTES:
            raise TooLarge("TooLarge", f"{path} has more than {MAX_BUNDLE_BYTES // 2**20} MiB as a zip file")
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
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 20,
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
        from tracelake.cli.zip_folder import zip_folder

        with tempfile.TemporaryFile() as made:
            zip_folder(path, made)
            yield made
    else:
        with path.open("rb") as given:
            yield given
