"""What every object store must do, and what verifying an output must refuse on any of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import msgspec
import pytest

from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.domain.errors import Forbidden, Invalid, NotFound, TooLarge, Unavailable
from tracelake.objects.base import (
    ObjectLocation,
    ObjectPrefix,
    ObjectStat,
    ObjectStore,
    bundle_location,
    delivery_location,
)
from tracelake.objects.directory import DirectoryStore
from tracelake.objects.verify import CONCURRENCY, verify_output

DATASET, VERSION, TASK, OTHER_TASK = (UUID(int=number) for number in range(1, 5))
HASH = "sha256:" + "0" * 64


@pytest.fixture(params=[DirectoryStore], ids=["directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    made: ObjectStore = request.param(tmp_path / "objects")
    return made


@pytest.fixture
def staging(store: ObjectStore) -> ObjectPrefix:
    return store.staging_prefix(DATASET, VERSION, TASK, 1, 7)


class TestStore:
    def test_staging_names_dataset_version_task_attempt_and_epoch(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        assert staging.uri == f"{store.root}dataset/{DATASET}/version/{VERSION}/{TASK}/1-7/"

    async def test_what_was_put_can_be_read_listed_and_measured(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        location = staging.child("part-0").location("blocks_0_9.parquet")
        await store.put(location, b"rows")
        assert await store.stat(location) == ObjectStat(location, 4)
        assert await store.read(location, 4) == b"rows"
        assert await store.list(staging) == (ObjectStat(location, 4),)

    async def test_put_replaces_whole_objects_whatever_runs_at_once(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        location = staging.location("a")
        contents = [bytes([number]) * 50_000 for number in range(8)]
        await asyncio.gather(*(store.put(location, content) for content in contents))
        assert await store.read(location, 100_000) in contents
        assert len(await store.list(staging)) == 1

    async def test_what_is_absent_is_told_from_what_cannot_be_read(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        await store.put(staging.location("file"), b"")
        for name in ("nothing", "x" * 300):
            assert await store.stat(staging.location(name)) is None
        assert await store.stat(staging.child("file").location("below")) is None
        assert await store.list(staging.child("nothing")) == ()
        with pytest.raises(NotFound):
            await store.read(staging.location("nothing"), 10)

    async def test_a_prefix_is_no_object(self, store: ObjectStore, staging: ObjectPrefix) -> None:
        await store.put(staging.child("dir").location("a"), b"")
        assert await store.stat(staging.location("dir")) is None
        with pytest.raises(NotFound):
            await store.read(staging.location("dir"), 10)

    async def test_reading_is_bounded(self, store: ObjectStore, staging: ObjectPrefix) -> None:
        await store.put(staging.location("a"), b"12345")
        with pytest.raises(TooLarge):
            await store.read(staging.location("a"), 4)

    async def test_an_upload_is_seen_whole_or_not_at_all(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        location = staging.location("large")
        upload = await store.begin_upload()
        for piece in (b"ab", b"c" * 3_000_000):
            await upload.write(piece)
        assert await store.list(store.root) == ()
        upload.file.seek(1)
        assert upload.file.read(2) == b"bc"
        await upload.write(b"d")
        await upload.keep(location)
        await upload.discard()
        pieces = [piece async for piece in store.read_pieces(location)]
        assert b"".join(pieces) == b"ab" + b"c" * 3_000_000 + b"d"
        assert len(pieces) > 1
        dropped = await store.begin_upload()
        await dropped.write(b"x")
        await dropped.discard()
        assert [found.location for found in await store.list(store.root)] == [location]

    async def test_an_upload_under_a_name_that_stands_for_its_content_is_kept_once(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        location = staging.location("by-hash")
        for content in (b"half", b"whole", b"whole"):
            upload = await store.begin_upload()
            await upload.write(content)
            await upload.keep(location)
            await upload.discard()
        assert await store.read(location, 10) == b"whole"
        with pytest.raises(NotFound):
            _ = [piece async for piece in store.read_pieces(staging.location("nothing"))]

    async def test_listing_goes_by_full_name_and_stops_at_its_limit(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        places = [staging.child("a").location("z"), staging.location("a-b"), staging.location("b")]
        for place in places:
            await store.put(place, b"")
        ordered = sorted(places, key=lambda place: place.uri)
        assert [found.location for found in await store.list(staging)] == ordered
        assert [found.location for found in await store.list(staging, 2)] == ordered[:2]

    async def test_nothing_outside_of_the_root_is_touched(self, store: ObjectStore) -> None:
        beside = ObjectPrefix.parse(store.root.uri.removesuffix("/") + "-beside/")
        for act in (
            store.stat(beside.location("a")),
            store.read(beside.location("a"), 1),
            store.put(beside.location("a"), b""),
            store.list(beside),
            store.delete_prefix(beside),
            store.delete_body(beside.child("delivery").location("a")),
        ):
            with pytest.raises(Forbidden):
                await act

    async def test_delete_removes_one_attempt_and_leaves_the_next(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        kept = store.staging_prefix(DATASET, VERSION, TASK, 1, 70).location("a")
        await store.put(kept, b"")
        await store.put(staging.location("a"), b"")
        await store.put(staging.child("sub").location("b"), b"")
        assert await store.delete_prefix(staging) == 2
        assert await store.delete_prefix(staging) == 0
        assert await store.list(store.root) == (ObjectStat(kept, 0),)

    async def test_a_body_of_a_delivery_is_removed_and_no_other_object(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        body, kept = [delivery_location(store.root, object_id) for object_id in (DATASET, VERSION)]
        others = [staging.location("a"), bundle_location(store.root, "0" * 64)]
        others.append(store.root.child("delivery").child("sub").location("a"))
        for place in (body, kept, *others):
            await store.put(place, b"x")
        await store.delete_body(body)
        await store.delete_body(body)
        assert await store.stat(body) is None
        for other in others:
            with pytest.raises(Forbidden):
                await store.delete_body(other)
        assert len(await store.list(store.root)) == 1 + len(others)

    @pytest.mark.parametrize("above", ["", "dataset/", f"dataset/{DATASET}/version/{VERSION}/{TASK}/"])
    async def test_delete_above_one_attempt_is_refused(
        self, store: ObjectStore, staging: ObjectPrefix, above: str
    ) -> None:
        await store.put(staging.location("a"), b"")
        with pytest.raises(Forbidden):
            await store.delete_prefix(ObjectPrefix.parse(store.root.uri + above))
        assert await store.stat(staging.location("a"))


class TestDirectory:
    @pytest.fixture
    def folder(self, store: ObjectStore, staging: ObjectPrefix) -> Path:
        path = Path("/" + staging.path)
        path.mkdir(parents=True)
        return path

    def test_plain_absolute_paths_are_locations(self, store: ObjectStore) -> None:
        assert store.locate("/a/b").uri == "file:///a/b"
        assert store.locate("/a/b/") == ObjectPrefix.parse("file:///a/b/")
        assert store.locate("file:///a/b") == ObjectLocation.parse("file:///a/b")
        for odd in ("a/b", "//a/b", "/a/../b", "/a//b", "/", ""):
            with pytest.raises(Invalid):
                store.locate(odd)

    @pytest.mark.parametrize("target", ["outside", "another attempt"])
    async def test_symbolic_links_below_the_root_are_refused(
        self, store: ObjectStore, staging: ObjectPrefix, folder: Path, tmp_path: Path, target: str
    ) -> None:
        elsewhere = tmp_path / "outside"
        if target == "another attempt":
            elsewhere = Path("/" + store.staging_prefix(DATASET, VERSION, OTHER_TASK, 1, 8).path)
        elsewhere.mkdir(parents=True)
        (elsewhere / "secret").write_bytes(b"secret")
        (folder / "link").symlink_to(elsewhere / "secret")
        (folder / "dir").symlink_to(elsewhere)
        for location in (staging.location("link"), staging.child("dir").location("secret")):
            for act in (store.stat(location), store.read(location, 10), store.put(location, b"")):
                with pytest.raises(Forbidden):
                    await act
        with pytest.raises(Forbidden):
            await store.list(staging)
        await store.delete_prefix(staging)
        assert (elsewhere / "secret").read_bytes() == b"secret"

    async def test_the_root_itself_may_be_reached_through_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "disk")
        linked = DirectoryStore(tmp_path / "link")
        await linked.put(linked.root.location("a"), b"1")
        assert (tmp_path / "disk" / "a").read_bytes() == b"1"

    async def test_unfinished_writes_and_special_files_are_no_objects(
        self, store: ObjectStore, staging: ObjectPrefix, folder: Path
    ) -> None:
        (folder / ".tmp-0011").write_bytes(b"half")
        os.mkfifo(folder / "pipe")
        assert await store.list(staging) == ()
        assert await store.stat(staging.location("pipe")) is None
        with pytest.raises(NotFound):
            await store.read(staging.location("pipe"), 10)
        with pytest.raises(Invalid):
            await store.put(staging.location(".tmp-0011"), b"")

    async def test_a_failing_disk_is_not_an_absent_object(
        self, store: ObjectStore, staging: ObjectPrefix, folder: Path
    ) -> None:
        (folder / "file").write_bytes(b"")
        with pytest.raises(Unavailable) as caught:
            await store.put(staging.child("file").location("below"), b"")
        assert str(folder) not in caught.value.message


def listed(location: ObjectLocation | str, **more: Any) -> ManifestFile:
    fields: dict[str, Any] = {"rows": 10, "bytes": 4, "content_hash": HASH, "min_block": 0, "max_block": 9}
    return ManifestFile(location=str(location), **(fields | more))


def manifest(*files: ManifestFile) -> Manifest:
    return Manifest(files=files, schema_hash=HASH, verified="full")


class TestVerify:
    @pytest.fixture
    async def files(self, store: ObjectStore, staging: ObjectPrefix) -> list[ObjectLocation]:
        """Two files of four bytes for blocks 0-9 and 10-19."""
        made = [
            staging.child("part-0").location("blocks_0_9.parquet"),
            staging.child("part-1").location("blocks_10_19.parquet"),
        ]
        for location in made:
            await store.put(location, b"PAR1")
        return made

    @pytest.fixture
    def check(self, store: ObjectStore, staging: ObjectPrefix) -> Callable[..., Any]:
        async def run(
            claimed: Manifest | None, row_count: int | None = 20, location: str = "", **more: Any
        ) -> tuple[ObjectStat, ...]:
            span = {"start": 0, "end": 19, "name": "blocks"} | more
            return await verify_output(store, staging, location or staging.uri, claimed, row_count, **span)

        return run

    @pytest.fixture
    def refusal(self, check: Callable[..., Any]) -> Callable[..., Any]:
        async def run(*args: Any, **more: Any) -> str:
            with pytest.raises(Invalid) as caught:
                await check(*args, **more)
            return caught.value.reason

        return run

    @pytest.fixture
    def both(self, files: list[ObjectLocation]) -> Manifest:
        return manifest(listed(files[0]), listed(files[1], min_block=10, max_block=19))

    async def test_a_true_manifest_passes_and_yields_its_files(
        self, check: Any, both: Manifest, files: list[ObjectLocation], staging: ObjectPrefix
    ) -> None:
        expected = tuple(ObjectStat(location, 4) for location in files)
        assert await check(both) == expected
        assert await check(both, location=staging.uri.removesuffix("/")) == expected
        assert await check(both, location="/" + staging.path) == expected
        assert await check(both, row_count=None) == expected
        assert await check(both, start=None, end=None) == expected

    async def test_a_listed_file_that_is_not_there(
        self, refusal: Any, both: Manifest, files: list[ObjectLocation], store: ObjectStore
    ) -> None:
        Path("/" + files[1].path).unlink()
        assert await refusal(both) == "OutputMissing"

    async def test_a_file_of_another_size(
        self, refusal: Any, both: Manifest, files: list[ObjectLocation], store: ObjectStore
    ) -> None:
        await store.put(files[1], b"PAR1 and more")
        assert await refusal(both) == "OutputSizeMismatch"

    @pytest.mark.parametrize(("task", "attempt", "epoch"), [(OTHER_TASK, 1, 7), (TASK, 2, 7), (TASK, 1, 8)])
    async def test_a_file_of_another_attempt(
        self, refusal: Any, store: ObjectStore, task: UUID, attempt: int, epoch: int
    ) -> None:
        other = store.staging_prefix(DATASET, VERSION, task, attempt, epoch).location("blocks_0_9.parquet")
        await store.put(other, b"PAR1")
        assert await refusal(manifest(listed(other)), 10) == "OutputOutsideStaging"
        assert await refusal(None, 10, location=other.uri) == "OutputOutsideStaging"

    @pytest.mark.parametrize("tail", ["../1-8/a", "*", "a%2fb", "x//y", "./a", "a\x00b"])
    async def test_a_location_that_is_not_canonical(
        self, refusal: Any, staging: ObjectPrefix, tail: str
    ) -> None:
        assert await refusal(None, 0, location=staging.uri + tail) == "OutputOutsideStaging"
        assert await refusal(manifest(listed(staging.uri + tail)), 10) == "OutputOutsideStaging"

    @pytest.mark.parametrize("location", ["/etc/passwd", "relative/a", "s3://lake/in/a", "file:///etc/"])
    async def test_a_location_elsewhere(self, refusal: Any, location: str) -> None:
        assert await refusal(None, 0, location=location) == "OutputOutsideStaging"

    async def test_a_link_out_of_the_attempt(
        self, refusal: Any, staging: ObjectPrefix, files: list[ObjectLocation], tmp_path: Path
    ) -> None:
        (tmp_path / "x").write_bytes(b"PAR1")
        link = staging.location("blocks_0_9.parquet")
        Path("/" + link.path).symlink_to(tmp_path / "x")
        assert await refusal(manifest(listed(link)), 10) == "OutputOutsideStaging"
        assert await refusal(None, 10) == "OutputOutsideStaging"

    async def test_totals_that_disagree(self, refusal: Any, both: Manifest) -> None:
        assert await refusal(both, 21) == "ManifestMismatch"
        assert await refusal(manifest(), 1) == "ManifestMismatch"

    async def test_an_empty_manifest_is_an_output_without_rows(self, check: Any) -> None:
        assert await check(manifest(), 0) == ()

    async def test_files_beside_the_reported_location(
        self, refusal: Any, both: Manifest, files: list[ObjectLocation], staging: ObjectPrefix
    ) -> None:
        assert await refusal(both, location=staging.child("part-0").uri) == "ManifestMismatch"
        assert await refusal(both, location=files[0].uri) == "ManifestMismatch"

    async def test_a_single_file_as_the_location(self, check: Any, files: list[ObjectLocation]) -> None:
        expected = (ObjectStat(files[0], 4),)
        assert await check(manifest(listed(files[0])), 10, location=files[0].uri) == expected
        assert await check(None, 10, location=files[0].uri) == expected

    async def test_a_part_that_was_retried_and_reported_twice(
        self, refusal: Any, files: list[ObjectLocation], staging: ObjectPrefix, store: ObjectStore
    ) -> None:
        again = staging.child("part-0-retry").location("blocks_0_9.parquet")
        await store.put(again, b"PAR1")
        assert await refusal(manifest(listed(files[0]), listed(again))) == "ManifestMismatch"
        assert await refusal(None) == "ManifestMismatch"
        same = manifest(listed(files[0]), listed(files[0]))
        assert await refusal(same, start=None, end=None) == "ManifestMismatch"

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("blocks.parquet", "OutputNameInvalid"),
            ("logs_0_9.parquet", "OutputNameInvalid"),
            ("blocks_0_9.csv", "OutputNameInvalid"),
            ("blocks_9_0.parquet", "OutputNameInvalid"),
            ("blocks_-1_9.parquet", "OutputNameInvalid"),
            ("blocks_0_99999999999999999999.parquet", "OutputNameInvalid"),
            ("blocks_0_9999999999999999999.parquet", "OutputNameInvalid"),
            ("blocks_٠_٩.parquet", "OutputNameInvalid"),
            ("blocks_0_20.parquet", "OutputRangeInvalid"),
            ("blocks_20_29.parquet", "OutputRangeInvalid"),
        ],
    )
    async def test_a_file_name_that_does_not_tell_a_range_of_the_output(
        self, refusal: Any, staging: ObjectPrefix, store: ObjectStore, name: str, reason: str
    ) -> None:
        location = staging.location(name)
        await store.put(location, b"PAR1")
        assert await refusal(manifest(listed(location)), 10) == reason
        assert await refusal(None, 10) == reason
        assert await refusal(None, 10, location=location.uri) == reason

    async def test_blocks_outside_of_the_files_own_range(
        self, refusal: Any, files: list[ObjectLocation]
    ) -> None:
        assert await refusal(manifest(listed(files[0], max_block=10)), 10) == "ManifestMismatch"

    @pytest.mark.parametrize(("start", "end"), [(0, None), (None, 9), (9, 0), (-1, 5), (0, 2**63)])
    async def test_a_range_that_is_none(self, refusal: Any, start: int | None, end: int | None) -> None:
        assert await refusal(manifest(), 0, start=start, end=end) == "OutputRangeInvalid"

    async def test_without_a_manifest_something_must_be_there_unless_it_has_no_rows(
        self, check: Any, refusal: Any, staging: ObjectPrefix, store: ObjectStore
    ) -> None:
        assert await refusal(None, 10) == "OutputMissing"
        assert await refusal(None, None) == "OutputMissing"
        assert await check(None, 0) == ()
        await store.put(staging.location("_SUCCESS"), b"")
        assert await refusal(None, 10) == "OutputMissing"
        await store.put(staging.location("blocks_0_9.parquet"), b"PAR1")
        assert [found.location.name for found in await check(None, 10)] == ["blocks_0_9.parquet"]
        assert await check(None, 10, location=staging.uri.removesuffix("/"))

    async def test_many_files_are_measured_with_bounded_concurrency(
        self, store: ObjectStore, staging: ObjectPrefix
    ) -> None:
        running = most = 0

        class Counting(DirectoryStore):
            async def stat(self, location: ObjectLocation) -> ObjectStat | None:
                nonlocal running, most
                running += 1
                most = max(most, running)
                try:
                    return await super().stat(location)
                finally:
                    running -= 1

        places = [staging.location(f"blocks_{number}_{number}.parquet") for number in range(100)]
        for place in places:
            Path("/" + place.path).parent.mkdir(parents=True, exist_ok=True)
            Path("/" + place.path).write_bytes(b"PAR1")
        claimed = manifest(*(listed(place, min_block=None, max_block=None) for place in places))
        counting = Counting(Path("/" + store.root.path))
        found = await verify_output(counting, staging, staging.uri, claimed, 1000, 0, 99)
        assert [one.location for one in found] == places
        assert 1 < most <= CONCURRENCY


class TestManifestShape:
    GOOD: ClassVar[dict[str, Any]] = {
        "files": [{"location": "/a", "rows": 1, "bytes": 1, "content_hash": HASH}],
        "schema_hash": HASH,
    }

    def test_a_manifest_survives_the_wire(self) -> None:
        made = manifest(listed("/a"))
        assert msgspec.json.decode(msgspec.json.encode(made), type=Manifest) == made
        assert msgspec.convert(self.GOOD, Manifest).row_count == 1

    @pytest.mark.parametrize(
        "change", [{"extra": 1}, {"schema_hash": "md5:1"}, {"files": None}, {"verified": ""}]
    )
    def test_a_malformed_manifest_is_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(self.GOOD | change, Manifest)

    @pytest.mark.parametrize(
        "change",
        [
            {"rows": -1},
            {"rows": "1"},
            {"bytes": 2**63},
            {"content_hash": "sha256:" + "0" * 63},
            {"content_hash": HASH + "\n"},
            {"content_hash": HASH.replace("0", "G")},
            {"location": ""},
            {"min_block": 1},
            {"min_block": 2, "max_block": 1},
            {"min_block": -1, "max_block": 1},
            {"rows": 0, "min_block": 1, "max_block": 1},
            {"path": "/a"},
        ],
        ids=str,
    )
    def test_a_malformed_file_entry_is_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(self.GOOD | {"files": [self.GOOD["files"][0] | change]}, Manifest)


async def test_a_folder_that_is_gone_is_an_outage_and_not_an_empty_store(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "objects")
    (tmp_path / "objects").rmdir()
    with pytest.raises(Unavailable, match="is gone"):
        await store.stat(store.root.location("a"))
    with pytest.raises(Unavailable, match="is gone"):
        await store.put(store.root.location("a"), b"")
