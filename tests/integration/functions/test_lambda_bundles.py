"""The invoker's bundles: what is fetched, verified, unpacked, and what is refused before it touches the disk."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.functions import link_in_zip, sha256_of, zip_of
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.worker.lambda_.bundle_cache import BundleCache

GOOD = zip_of({"main.py": "x = 1", "pkg/data.txt": "d", "bootstrap": "#!/bin/sh\n"})


class Store:
    """Where bundles come from; counts how often."""

    def __init__(self, *bundles: bytes) -> None:
        self.bundles = {sha256_of(bundle): bundle for bundle in bundles}
        self.fetched = 0

    async def fetch(self, sha256: str) -> AsyncIterator[bytes]:
        self.fetched += 1
        content = self.bundles[sha256]
        yield content[: len(content) // 2]
        yield content[len(content) // 2 :]


def bomb() -> bytes:
    return zip_of({"main.py": "x = 1", "zeros": b"\0" * (64 * 1024 * 1024)})


def lying_about_its_size() -> bytes:
    """Says it is small, and unpacks to more."""
    honest = bytearray(zip_of({"main.py": b"a" * 100_000}))
    for magic, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = honest.find(magic)
        honest[at + offset : at + offset + 4] = struct.pack("<L", 10)
    return bytes(honest)


async def test_a_bundle_is_fetched_once_and_unpacked_as_it_is(tmp_path: Path) -> None:
    store = Store(GOOD)
    cache = BundleCache(tmp_path / "bundles", store.fetch)
    for number in range(2):
        bundle = await cache.open(sha256_of(GOOD))
        bundle.unpack(tmp_path / str(number))
        bundle.close()
    assert store.fetched == 1
    code = tmp_path / "1"
    assert (code / "main.py").read_text() == "x = 1"
    assert stat.S_IMODE((code / "main.py").stat().st_mode) == 0o444
    assert stat.S_IMODE((code / "pkg").stat().st_mode) == 0o755
    assert stat.S_IMODE((code / "bootstrap").stat().st_mode) == 0o555
    assert stat.S_IMODE((tmp_path / "bundles").stat().st_mode) == 0o700


async def test_whatever_the_umask_is_the_functions_user_can_read_its_code(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        cache = BundleCache(tmp_path / "bundles", Store(GOOD).fetch)
        bundle = await cache.open(sha256_of(GOOD))
        bundle.unpack(tmp_path / "code")
        bundle.close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "code").rglob("*")}
    assert modes == {"main.py": 0o444, "pkg": 0o755, "data.txt": 0o444, "bootstrap": 0o555}


async def test_a_cached_zip_is_hashed_again_before_each_use(tmp_path: Path) -> None:
    store = Store(GOOD)
    cache = BundleCache(tmp_path / "bundles", store.fetch)
    (await cache.open(sha256_of(GOOD))).close()
    [cached] = (tmp_path / "bundles").glob("*.zip")
    cached.write_bytes(zip_of({"main.py": "x = 2"}))
    assert await cache.touched(sha256_of(GOOD))
    bundle = await cache.open(sha256_of(GOOD))
    bundle.unpack(tmp_path / "code")
    bundle.close()
    assert (tmp_path / "code" / "main.py").read_text() == "x = 1"
    assert store.fetched == 2


async def test_what_is_unpacked_is_what_was_hashed_even_if_the_name_is_replaced(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path / "bundles", Store(GOOD).fetch)
    bundle = await cache.open(sha256_of(GOOD))
    [cached] = (tmp_path / "bundles").glob("*.zip")
    replacement = tmp_path / "other"
    replacement.write_bytes(zip_of({"main.py": "x = 2"}))
    os.replace(replacement, cached)
    bundle.unpack(tmp_path / "code")
    bundle.close()
    assert (tmp_path / "code" / "main.py").read_text() == "x = 1"


async def test_other_bytes_than_the_ones_asked_for_are_refused_and_not_kept(tmp_path: Path) -> None:
    store = Store()
    store.bundles[sha256_of(GOOD)] = zip_of({"main.py": "x = 2"})
    cache = BundleCache(tmp_path / "bundles", store.fetch)
    with pytest.raises(Invalid, match="doesn't match"):
        await cache.open(sha256_of(GOOD))
    assert list((tmp_path / "bundles").iterdir()) == []


async def test_a_fetch_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    async def broken(_: str) -> AsyncIterator[bytes]:
        yield GOOD[:10]
        raise Unavailable("BundleNotFetched", "broke off")

    cache = BundleCache(tmp_path / "bundles", broken)
    with pytest.raises(Unavailable):
        await cache.open(sha256_of(GOOD))
    assert list((tmp_path / "bundles").iterdir()) == []


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(link_in_zip("main.py", "/etc/passwd"), id="link"),
        pytest.param(zip_of({"../outside.py": "x"}), id="dots"),
        pytest.param(zip_of({"/absolute.py": "x"}), id="absolute"),
        pytest.param(zip_of({"a/../../outside.py": "x"}), id="dots inside"),
        pytest.param(bomb(), id="bomb"),
        pytest.param(b"not a zip", id="no zip"),
        pytest.param(b"", id="empty"),
    ],
)
async def test_a_hostile_zip_is_refused_before_anything_is_unpacked(tmp_path: Path, hostile: bytes) -> None:
    cache = BundleCache(tmp_path / "bundles", Store(hostile).fetch)
    with pytest.raises(Invalid):
        await cache.open(sha256_of(hostile))
    assert {path.name for path in tmp_path.rglob("*")} <= {"bundles", f"{sha256_of(hostile)}.zip"}


async def test_an_entry_never_unpacks_to_more_than_it_declares(tmp_path: Path) -> None:
    hostile = lying_about_its_size()
    cache = BundleCache(tmp_path / "bundles", Store(hostile).fetch)
    bundle = await cache.open(sha256_of(hostile))
    with pytest.raises(Invalid, match="can't be unpacked"):
        bundle.unpack(tmp_path / "code")
    bundle.close()
    assert (tmp_path / "code" / "main.py").stat().st_size <= 10
