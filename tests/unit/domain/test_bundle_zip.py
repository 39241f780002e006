"""What may be a bundle: a zip file that means one thing to everybody and unpacks in its place, within bounds."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain import bundles
from tracelake.domain.bundles import BundleListing, check_zip, find_entrypoint
from tracelake.domain.errors import Invalid


def zipped(*entries: str | tuple[str, bytes, int], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Entries are names, or names with content and Unix mode."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", compression) as archive:
        for each in entries:
            name, content, mode = (each, b"x = 1\n", 0o644) if isinstance(each, str) else each
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = compression
            archive.writestr(info, content)
    return into.getvalue()


def listed(content: bytes) -> BundleListing:
    return check_zip(io.BytesIO(content))


def refused(content: bytes) -> str:
    with pytest.raises(Invalid) as refusal:
        listed(content)
    assert refusal.value.reason == "InvalidBundle"
    return refusal.value.message


def test_an_ordinary_zip_is_listed_with_its_executables() -> None:
    found = listed(zipped("main.py", ("lib/", b"", stat.S_IFDIR | 0o755), "lib/a.py", ("run", b"#!", 0o755)))
    assert found.names == ("lib/a.py", "main.py", "run")
    assert found.executables == {"run"}
    assert found.unpacked_bytes == 14


def test_a_zip_from_other_tools_is_taken_as_it_is() -> None:
    plain = zipped("main.py", "größe.py")
    assert listed(plain).names == ("größe.py", "main.py") or listed(plain).names == ("main.py", "größe.py")
    into = io.BytesIO(plain)
    with zipfile.ZipFile(into, "a") as archive:
        archive.comment = b"made by a tool"
    assert len(listed(into.getvalue()).names) == 2
    streamed = io.BytesIO()
    unseekable = type("Pipe", (), {"write": streamed.write, "flush": lambda self: None})()
    with zipfile.ZipFile(unseekable, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("main.py", "pass")
    assert listed(streamed.getvalue()).names == ("main.py",)


@pytest.mark.parametrize(
    "name",
    [
        *("../evil.py", "a/../../evil.py", "/etc/passwd", "a//b", "./a", "a/./b", "..", "C:evil", "c:/evil"),
        *("a\\b", "a\nb", "a\x1b[0m", "x" * 300, "d/" * 300 + "x"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    assert "name" in refused(zipped("main.py", name))


def test_a_name_that_is_cut_at_a_nul_is_refused() -> None:
    assert "name" in refused(zipped("main.py", "evilXpy").replace(b"evilXpy", b"evil\0py"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_are_refused(kind: int) -> None:
    assert "link or a device" in refused(zipped("main.py", ("etc", b"/etc/passwd", kind | 0o777)))


def test_a_folder_that_says_it_is_a_file_is_refused() -> None:
    assert "neither" in refused(zipped("main.py", ("lib/", b"", stat.S_IFREG | 0o644)))
    assert "neither" in refused(zipped("main.py", ("lib", b"", stat.S_IFDIR | 0o755)))
    assert "content" in refused(zipped("main.py", ("lib/", b"x", stat.S_IFDIR | 0o755)))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_is_refused() -> None:
    assert "twice" in refused(zipped("main.py", "main.py"))
    assert "both" in refused(zipped("lib", "lib/a.py"))
    assert "both" in refused(zipped("lib", ("lib/", b"", stat.S_IFDIR | 0o755)))


def test_a_bomb_is_refused_before_anything_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "100 times" in refused(zipped("main.py", ("zeros", bytes(2 * 1024 * 1024), 0o644)))
    assert len(listed(zipped(("zeros", bytes(1024 * 1024), 0o644))).names) == 1
    monkeypatch.setattr(bundles, "MAX_UNPACKED_BYTES", 10)
    assert "unpacked" in refused(zipped("main.py", "b.py"))


def test_more_entries_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_ENTRIES", 2)
    assert len(listed(zipped("a", "b")).names) == 2
    three = zipped("a", "b", "c")
    assert "entries" in refused(three)
    understated = three[:-14] + struct.pack("<2H", 2, 2) + three[-10:]
    assert "entries" in refused(understated), "the count at the end is a claim, not a fact"


def test_a_directory_that_is_too_long_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_MAX_DIRECTORY_BYTES", 60)
    assert "long names" in refused(zipped("a", "b"))


def patched(content: bytes, at: int, value: bytes) -> bytes:
    return content[:at] + value + content[at + len(value) :]


def directory_of(content: bytes) -> int:
    return content.index(b"PK\x01\x02")


def one(compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    return zipped("main.py", "other.py", compression=compression)


def with_zip64_locator(content: bytes) -> bytes:
    """A second end, which some readers prefer, between the directory and the end."""
    at = content.rindex(b"PK\x05\x06")
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
    return content[:at] + locator + content[at:]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda z: b"", "not a zip"),
        (lambda z: b"PK", "not a zip"),
        (lambda z: b"#!/bin/sh\n" * 9, "not a zip"),
        (lambda z: z[:-5], "not a zip"),
        (lambda z: z + b"more", "after the end"),
        (lambda z: b"#!/bin/sh\n" + z, "isn't at the recorded offset"),
        (lambda z: patched(z, len(z) - 18, b"\1"), "split"),
        (with_zip64_locator, "ZIP64"),
        (lambda z: patched(z, len(z) - 10, b"\xff\xff\xff\xff"), "ZIP64"),
        (lambda z: patched(z, directory_of(z), b"XX"), "can't be read"),
        (lambda z: patched(z, directory_of(z) + 8, b"\1"), "encrypted"),
        (lambda z: patched(z, directory_of(z) + 10, b"\x0c"), "deflated"),
        (lambda z: patched(z, directory_of(z) + 42, b"\1"), "before its first"),
        (lambda z: patched(z, 0, b"XX"), "no entry"),
        (lambda z: patched(z, 30, b"evil"), "differs from the directory"),
        (lambda z: patched(z, 8, b"\x00"), "differs from the directory"),
        (lambda z: patched(z, directory_of(z) + 20, b"\xff"), "shares its bytes"),
    ],
)
def test_a_zip_that_two_readers_would_see_differently_is_refused(
    spoil: Callable[[bytes], bytes], why: str
) -> None:
    assert why in refused(spoil(one()))


def test_entries_that_share_their_bytes_are_refused() -> None:
    content = one()
    second = content.index(b"PK\x01\x02", directory_of(content) + 4)
    assert "shares" in refused(patched(content, second + 42, b"\0\0\0\0"))


def test_an_empty_zip_is_refused() -> None:
    assert "no file" in refused(zipped(("lib/", b"", stat.S_IFDIR | 0o755)))
    assert refused(zipped())


@given(st.integers(0, 600), st.binary(min_size=1, max_size=4))
def test_a_damaged_zip_is_listed_or_refused_and_nothing_else(at: int, damage: bytes) -> None:
    content = one()
    spoilt = io.BytesIO(patched(content, at % len(content), damage))
    try:
        found = check_zip(spoilt)
    except Invalid:
        return
    assert all(".." not in name.split("/") and not name.startswith("/") for name in found.names)


def bundle(*names: str, executable: str = "") -> BundleListing:
    return BundleListing(names, frozenset({executable} & set(names)), 1)


@pytest.mark.parametrize(
    ("names", "entrypoint", "kind", "file", "function"),
    [
        (("main.py",), "main.handler", "python", "main.py", "handler"),
        (("app/__init__.py",), "app.handler", "python", "app/__init__.py", "handler"),
        (("app/main.py",), "app.main.handler", "python", "app/main.py", "handler"),
        (("app/main.py",), "app/main.handler", "python", "app/main.py", "handler"),
        (("index.js",), "index.handler", "node", "index.js", "handler"),
        (("index.mjs", "lib.py"), "index.handler", "node", "index.mjs", "handler"),
        (("src/index.cjs",), "src/index.handler", "node", "src/index.cjs", "handler"),
    ],
)
def test_an_entrypoint_means_one_file(
    names: tuple[str, ...], entrypoint: str, kind: str, file: str, function: str
) -> None:
    found = find_entrypoint(bundle(*names), entrypoint)
    assert (found.kind, found.file, found.function) == (kind, file, function)


def test_an_executable_bootstrap_wins_and_reads_the_entrypoint_itself() -> None:
    assert (
        find_entrypoint(bundle("bootstrap", "main.py", executable="bootstrap"), "main.handler").kind
        == "bootstrap"
    )
    assert (
        find_entrypoint(bundle("bootstrap", executable="bootstrap"), "whatever it likes").kind == "bootstrap"
    )
    assert find_entrypoint(bundle("bootstrap", "main.py"), "main.handler").kind == "python"
    assert (
        find_entrypoint(bundle("bin/bootstrap", "main.py", executable="bin/bootstrap"), "main.h").kind
        == "python"
    )


@pytest.mark.parametrize(
    ("names", "entrypoint", "why"),
    [
        (("main.py",), "other.handler", "neither other.py"),
        (("main.py",), "main", "module.function"),
        (("main.py",), ".handler", "module.function"),
        (("main.py",), "main.", "module.function"),
        (("main.py",), "../main.handler", "module.function"),
        (("main.py",), "main.handler; rm", "module.function"),
        (("main.py", "main.js"), "main.handler", "any of main.py, main.js"),
        (("bootstrap",), "main.handler", "not executable"),
    ],
)
def test_an_entrypoint_that_is_not_there_is_explained(
    names: tuple[str, ...], entrypoint: str, why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        find_entrypoint(bundle(*names), entrypoint)
