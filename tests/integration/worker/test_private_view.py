"""What operators see: the plan of mounts, and that carrying it out leaves the machine as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.operator_scene import attempt, make_home, running_host, spawn
from tracelake.worker.host.private_view import Blank, Cover, Show, Step, plan_view

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: Path("/", *parts))


def nothing_is_closed(_: Path) -> bool:
    return False


def visible(path: Path, steps: list[Step]) -> bool:
    """Whether the content at this path is what it was, after the steps in their order."""
    seen = True
    for step in steps:
        if path.is_relative_to(step.path):
            seen = isinstance(step, Show)
    return seen


def test_a_home_shows_its_objects_and_nothing_else() -> None:
    steps = plan_view(
        covered=[Path("/srv/home")],
        blanked=[],
        shown=[Path("/srv/home/objects"), Path("/usr/lib/python")],
        closed=nothing_is_closed,
    )
    assert steps == [Cover(Path("/srv/home")), Show(Path("/srv/home/objects"))]


def test_a_closed_folder_becomes_a_skeleton_that_leads_to_the_interpreter() -> None:
    steps = plan_view(
        covered=[Path("/closed/home")],
        blanked=[Path("/closed/token")],
        shown=[Path("/closed/python/3"), Path("/closed/home/objects")],
        closed=lambda path: path == Path("/closed"),
    )
    assert steps == [
        Cover(Path("/closed")),
        Show(Path("/closed/home/objects")),
        Show(Path("/closed/python/3")),
    ]


def test_a_home_within_something_shown_is_covered_again() -> None:
    steps = plan_view(
        covered=[Path("/closed/project/.home")],
        blanked=[Path("/closed/project/token")],
        shown=[Path("/closed/project"), Path("/closed/project/.home/objects")],
        closed=lambda path: path == Path("/closed"),
    )
    assert steps == [
        Cover(Path("/closed")),
        Show(Path("/closed/project")),
        Cover(Path("/closed/project/.home")),
        Show(Path("/closed/project/.home/objects")),
        Blank(Path("/closed/project/token")),
    ]


@given(
    covered=st.sets(PATHS, max_size=3),
    blanked=st.sets(PATHS, max_size=2),
    shown=st.sets(PATHS, max_size=3),
    closed=st.sets(PATHS, max_size=2),
    asked=PATHS,
)
def test_what_is_covered_is_seen_only_where_something_within_it_is_shown(
    covered: set[Path], blanked: set[Path], shown: set[Path], closed: set[Path], asked: Path
) -> None:
    steps = plan_view(covered=covered, blanked=blanked, shown=shown, closed=lambda path: path in closed)
    deepest_cover = max((len(path.parts) for path in covered if asked.is_relative_to(path)), default=0)
    deepest_show = max((len(path.parts) for path in shown if asked.is_relative_to(path)), default=0)
    if deepest_cover and deepest_cover >= deepest_show:
        assert not visible(asked, steps)
    for path in blanked:
        assert not visible(path, steps)
    for path in shown - covered - blanked:
        hides = (*covered, *blanked, *(each for other in shown for each in other.parents if each in closed))
        if not any(path.is_relative_to(each) and len(each.parts) >= len(path.parts) for each in hides):
            assert visible(path, steps) or any(path.is_relative_to(each) for each in blanked)


async def test_nothing_of_the_view_is_seen_outside(tmp_path: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    spec = make_home(tmp_path)
    async with running_host(spec) as host:
        assert Path("/proc/self/mountinfo").read_text() == before
        assert ((spec.home or tmp_path) / "secrets.json").read_text()
        told = await attempt(await spawn(host), "print(len(open('/proc/self/mountinfo').readlines()))")
        assert int(told.output) > len(before.splitlines())
    assert Path("/proc/self/mountinfo").read_text() == before


async def test_an_object_root_and_a_work_folder_reached_through_links_show_no_more(tmp_path: Path) -> None:
    spec = make_home(tmp_path)
    link = tmp_path / "linked"
    link.symlink_to(tmp_path / "home")
    linked = replace(spec, home=link, object_root=link / "objects", work_folder=link / "work")
    for name in ("shown", "other"):
        (spec.object_root / "dataset" / name).mkdir(parents=True)
        (spec.object_root / "dataset" / name / "file").write_text("content")
    async with running_host(linked) as host:
        code = f"""
        import os
        print(open({str(spec.object_root / "dataset/shown/file")!r}).read())
        for home in {[str(link), str(spec.home)]!r}:
            for name in ("objects/dataset/other", "secrets.json"):
                print(os.path.exists(os.path.join(home, name)), end=" ")
        """
        process = await spawn(host)
        await process.grant(["dataset/shown"], [])
        told = await attempt(process, code)
    assert told.output == "content\nFalse False False False "
