"""Canonical prefixes: one spelling per place, and containment that can't be talked around."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.errors import Invalid
from tracelake.objects.base import ObjectLocation, ObjectPrefix

segments = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="/*?$%#\\"),
    min_size=1,
    max_size=12,
).filter(lambda text: ".." not in text and text != ".")
paths = st.lists(segments, min_size=1, max_size=5).map("/".join)
anchors = st.sampled_from(["s3://lake", "s3://other-bucket", "file://"])
nasty = st.text(st.sampled_from("ab./\\*?%2e$#:@ \x00\n\u202e"), max_size=24)


@given(anchors, paths)
def test_a_canonical_prefix_is_its_own_canonical_form(anchor: str, path: str) -> None:
    prefix = ObjectPrefix.parse(f"{anchor}/{path}/")
    assert prefix.uri == f"{anchor}/{path}/"
    assert ObjectPrefix.parse(prefix.uri) == prefix
    assert ObjectPrefix.parse(f"{anchor}/{path}") == prefix


@given(anchors, paths, segments, segments)
def test_children_lie_below_and_parents_do_not(anchor: str, path: str, name: str, other: str) -> None:
    prefix = ObjectPrefix.parse(f"{anchor}/{path}/")
    child = prefix.child(name)
    assert prefix.contains(child)
    assert prefix.contains(child.location(other))
    assert prefix.contains(prefix)
    assert not child.contains(prefix)
    assert child.contains(prefix.location(other)) is False


@given(anchors, paths, segments)
def test_a_sibling_whose_name_begins_alike_is_outside(anchor: str, path: str, more: str) -> None:
    prefix = ObjectPrefix.parse(f"{anchor}/{path}/")
    assert not prefix.contains(f"{anchor}/{path}-{more}/x")
    assert not prefix.contains(f"{anchor}/{path}-{more}/")
    assert not prefix.contains(f"{anchor}/{path}")


@given(anchors, nasty)
def test_whatever_is_accepted_is_free_of_tricks(anchor: str, tail: str) -> None:
    text = f"{anchor}/base/{tail}"
    try:
        prefix = ObjectPrefix.parse(text)
    except Invalid:
        return
    assert prefix.uri.rstrip("/") == text.rstrip("/")
    path = prefix.path
    assert path.startswith("base/")
    assert path.endswith("/")
    assert ".." not in path
    assert "//" not in path
    assert "/./" not in path
    assert not set(path) & set("*?$%#\\\x00\n\u202e")


@given(nasty)
def test_a_place_that_is_contained_stays_below_when_a_file_system_resolves_it(tail: str) -> None:
    prefix = ObjectPrefix.parse("file:///lake/in/")
    if prefix.contains(f"file:///lake/in/{tail}"):
        kept: list[str] = []
        for part in f"/lake/in/{tail}".split("/"):
            if part == "..":
                kept = kept[:-1]
            elif part not in ("", "."):
                kept.append(part)
        assert kept[:2] == ["lake", "in"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "lake/in/",
        "s3:/lake/in/",
        "s3://",
        "s3:///in/",
        "s3://lake",
        "s3://lake/",
        "s3://lake//",
        "s3://lake//in/",
        "s3://lake/in//",
        "s3://lake/in/../out/",
        "s3://lake/..",
        "s3://lake/a..b/",
        "s3://lake/./in/",
        "s3://lake/.",
        "s3://lake/*/",
        "s3://lake/in*",
        "s3://lake/i?/",
        "s3://lake/in/?versionId=1",
        "s3://lake/in/#x",
        "s3://lake/%2e%2e/",
        "s3://lake/in%2F/",
        "s3://lake/${aws:username}/",
        "s3://lake/in\\out/",
        "s3://lake/in\x00/",
        "s3://lake/in\n/",
        "s3://lake/in\x7f/",
        "s3://lake/in\u202e/",
        "s3://lake/in\u2028/",
        "s3://lake/in\ud800/",
        "s3://LAKE/in/",
        "s3://la*ke/in/",
        "s3://la..ke/in/",
        "s3://-lake/in/",
        "s3://la/in/",
        "s3://user@lake/in/",
        "s3://lake:9000/in/",
        "S3://lake/in/",
        "http://lake/in/",
        "s3a://lake/in/",
        "file://",
        "file:///",
        "file:////etc/",
        "file://host/dir/",
        "file:///a/../b/",
        "s3://lake/" + "x" * 1024 + "/",
    ],
)
def test_what_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        ObjectPrefix.parse(text)
    assert caught.value.reason == "PrefixInvalid"
    assert not ObjectPrefix.parse("s3://lake/in/").contains(text)


def test_other_buckets_and_schemes_are_outside() -> None:
    prefix = ObjectPrefix.parse("s3://lake/in/")
    assert prefix.contains("s3://lake/in/a.parquet")
    assert not prefix.contains("s3://lake2/in/a.parquet")
    assert not prefix.contains("file:///in/a.parquet")
    assert not ObjectPrefix.parse("file:///lake/in/").contains("s3://lake/in/a")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a/", "/a", "*", "a\x00"])
def test_a_child_is_one_plain_name(name: str) -> None:
    prefix = ObjectPrefix.parse("s3://lake/in/")
    with pytest.raises(Invalid):
        prefix.child(name)
    with pytest.raises(Invalid):
        prefix.location(name)


def test_a_location_is_an_object_and_no_folder() -> None:
    assert ObjectLocation.parse("s3://lake/in/a.parquet").name == "a.parquet"
    for text in ("s3://lake/in/", "s3://lake", "file:///"):
        with pytest.raises(Invalid):
            ObjectLocation.parse(text)
