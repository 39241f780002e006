"""The supervisor of ``tracelake dev``: what is started when, what is said, and in which order it all ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest

from tracelake.dev import parts
from tracelake.dev.child_process import ChildSpec
from tracelake.dev.supervisor import STOP_SECONDS, PartProgress, PartState, Supervisor, delay_before_restart
from tracelake.domain.errors import Unavailable


class Recorder:
    """A listener that keeps everything, and requests a stop when it is set to."""

    def __init__(self) -> None:
        self.news: list[PartProgress] = []
        self.on_news: Callable[[PartProgress], None] = lambda _: None

    def part(self, news: PartProgress) -> None:
        self.news.append(news)
        self.on_news(news)

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def states(self, name: str) -> list[PartState]:
        return [news.state for news in self.news if news.name == name]


class FakePart:
    """Starts at once, unless it is held or fails, and lives until somebody says otherwise."""

    pid = None
    ended = "was killed by SIGKILL"

    def __init__(self, name: str, journal: list[str], *, fails: bool = False) -> None:
        self.name = name
        self.alive = False
        self.may_start = threading.Event()
        self.may_start.set()
        self._fails = fails
        self._journal = journal

    def start(self, stopping: threading.Event) -> None:
        self._journal.append(f"start {self.name}")
        while not self.may_start.wait(0.01):
            if stopping.is_set():
                return
        if self._fails:
            raise Unavailable("PartFailed", f"{self.name}: no")
        self.alive = True

    def stop(self) -> None:
        self.alive = False
        self._journal.append(f"stop {self.name}")

    def log_tail(self) -> tuple[str, ...]:
        return ("the last line",)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def supervisor(recorder: Recorder) -> Iterator[Supervisor]:
    supervisor = Supervisor(recorder)
    yield supervisor
    supervisor.stop()


def test_a_part_starts_when_what_it_needs_is_ready_and_others_start_beside(
    supervisor: Supervisor, recorder: Recorder
) -> None:
    journal: list[str] = []
    base, early, late = (FakePart(name, journal) for name in ("base", "early", "late"))
    base.may_start.clear()

    def release(news: PartProgress) -> None:
        if (news.name, news.state) == ("early", PartState.READY):
            assert "start late" not in journal
            base.may_start.set()

    recorder.on_news = release
    assert supervisor.bring_up([[base], [early], [late]], {"late": frozenset({"base"})})
    assert journal[-1] == "start late"
    assert recorder.states("late") == [PartState.WAITING, PartState.STARTING, PartState.READY]
    supervisor.stop()
    assert journal[3:] == ["stop late", "stop early", "stop base"]


def test_one_that_can_not_be_started_ends_the_start_with_its_reason(
    supervisor: Supervisor, recorder: Recorder
) -> None:
    journal: list[str] = []
    parts = [FakePart("good", journal), FakePart("bad", journal, fails=True), FakePart("after", journal)]
    with pytest.raises(Unavailable, match="bad: no"):
        supervisor.bring_up([parts], {"after": frozenset({"bad"})})
    assert recorder.news[-1].state is PartState.FAILED
    supervisor.stop()
    assert "start after" not in journal
    assert not any(part.alive for part in parts)


def test_a_stop_during_the_start_is_heard(supervisor: Supervisor, recorder: Recorder) -> None:
    journal: list[str] = []
    part = FakePart("slow", journal)
    part.may_start.clear()
    recorder.on_news = lambda news: supervisor.request_stop() if news.state is PartState.STARTING else None
    assert not supervisor.bring_up([[part]], {})
    supervisor.stop()
    assert recorder.states("slow") == [PartState.WAITING, PartState.STARTING]
    assert journal[-1] == "stop slow"


def test_one_that_keeps_dying_is_restarted_ever_more_slowly_and_its_log_is_shown(
    supervisor: Supervisor, recorder: Recorder
) -> None:
    part = FakePart("query", [])
    assert supervisor.bring_up([[part]], {})
    restarts = 0

    def restarted() -> None:
        nonlocal restarts
        restarts += 1
        if restarts < 3:
            part.alive = False
        else:
            supervisor.request_stop()

    part.alive = False
    supervisor.watch(restarted)
    deaths = [news for news in recorder.news if news.state is PartState.DIED]
    assert [news.why for news in deaths] == ["was killed by SIGKILL"] * 3
    assert [news.seconds for news in deaths] == [delay_before_restart(n) for n in (1, 2, 3)]
    assert [news.log_tail for news in deaths] == [(), (), ("the last line",)]
    assert recorder.news[-1].again


def test_all_stages_hanging_one_after_another_end_within_the_promised_time() -> None:
    child = next(each.default for each in fields(ChildSpec) if each.name == "stop_timeout")
    stages = (parts.TASK_STOP_SECONDS, child, parts.POSTGRES_STOP_SECONDS)
    assert sum(stages) < STOP_SECONDS < 10
