"""An object store is opened from an address, whose scheme chooses the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.simulation.world import MemoryStore
from tracelake import objects
from tracelake.domain.errors import Invalid
from tracelake.objects.directory import DirectoryStore
from tracelake.query.open_relation import ColdFiles


@pytest.mark.parametrize("name", ["objects", "with a space"])
def test_a_directory_is_opened_by_its_scheme_and_made(tmp_path: Path, name: str) -> None:
    store = objects.open(f"file://{tmp_path / name}")
    assert isinstance(store, DirectoryStore)
    assert (tmp_path / name).is_dir()
    assert store.root.uri == f"file://{tmp_path / name}/"


def test_a_folder_has_an_address_and_lends_its_files(tmp_path: Path) -> None:
    store = objects.open(objects.address(tmp_path / "objects"))
    assert store.local is not None
    assert store.local.folder == tmp_path / "objects"
    assert objects.address(store.root.uri) == store.root.uri


@pytest.mark.parametrize("url", ["s3://bucket/objects", "file://objects", "/objects", ""])
def test_an_object_store_of_an_unknown_scheme_is_refused_with_those_that_there_are(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        objects.open(url)
    assert refused.value.reason == "UnknownObjectScheme"
    assert "file:///" in refused.value.message


def test_a_reader_of_descriptors_refuses_a_store_that_has_none() -> None:
    with pytest.raises(Invalid) as refused:
        ColdFiles(MemoryStore())
    assert refused.value.reason == "ObjectsNotLocal"
    assert "s3://" in refused.value.message
