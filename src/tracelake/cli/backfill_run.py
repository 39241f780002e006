"""A backfill from the command's side: ask for what is missing, watch it come in, say why if it doesn't.

Everything is decided by the stack's answers, nothing by what this process remembers: it may be ended at any time.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

import typer

from tracelake.cli.backfill_report import Pace, Report, print_failures, summary
from tracelake.cli.failures import ExitCode
from tracelake.cli.patient_client import PatientClient
from tracelake.cli.show import counted
from tracelake.domain.errors import Conflict

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.contracts.coverage import BackfillState, Gap, JobName
    from tracelake.contracts.user_api import TaskDetail, TaskPage

_POLL = 0.5
_STUCK_AFTER = 30.0
_STILL_AFTER = 5.0
_INTERRUPTED = 130
_SPLIT_PATIENCE = 2.0
_SPLIT_POLL = 0.01


@dataclass
class Backfill:
    client: PatientClient
    dag: str
    job: str
    start: int
    end: int
    chunk: int | None
    order: str
    retried: set[UUID] = field(default_factory=set)
    told: set[UUID] = field(default_factory=set)
    idle_since: float | None = None
    still_since: float | None = None
    waiting: str = ""

    def look(self) -> BackfillState:
        return self.client.ask(
            lambda client: client.backfill(
                self.dag, self.job, start=self.start, end=self.end, chunk=self.chunk, order=self.order
            )
        )

    def run(self, report: Report, *, wait: bool) -> None:
        state = self.look()
        report.say(summary(state))
        try:
            state = self._ask(self._retry(state))
            if not wait:
                report.say(f"asked for; {counted(state.queued + state.running, 'task')} at work. {_resume()}")
                return
            self._watch(report, state)
        except KeyboardInterrupt:
            report.say(f"\nthe work goes on without this command. {_resume()}")
            raise typer.Exit(_INTERRUPTED) from None

    def _retry(self, state: BackfillState) -> BackfillState:
        """What failed before this command is tried again, once."""
        while due := [failure for failure in state.failed if failure.task_id not in self.retried]:
            for failure in due:
                self.retried.add(failure.task_id)
                with suppress(Conflict):
                    self.client.ask(partial(_retry_task, failure.task_id))
            state = self.look()
        return state

    def _ask(self, state: BackfillState) -> BackfillState:
        """Asking twice is harmless: what was said before isn't made again."""
        while state.events:
            for event in state.events:
                self.client.ask(partial(_trigger, state.source, event))
                if len(state.events) > 1 and state.splitter is not None:
                    self._until_split(state.splitter)
            state = self.look()
        return state

    def _until_split(self, splitter: JobName) -> None:
        """Tasks run in the order in which they were made: the next range is sent when this one has been cut. A
        splitter that takes long, or is paused, costs the order and not the backfill."""
        give_up = time.monotonic() + _SPLIT_PATIENCE
        while time.monotonic() < give_up:
            page = self.client.ask(partial(_newest_task, splitter))
            if not page.tasks or page.tasks[0].status not in ("Queued", "Running"):
                return
            time.sleep(_SPLIT_POLL)

    def _watch(self, report: Report, state: BackfillState) -> None:
        pace = Pace()
        while True:
            pace.note(state.committed_blocks)
            report.show(state, pace)
            print_failures(state.failed, self.told, report)
            if state.committed_blocks == state.blocks:
                report.say(f"all {counted(state.blocks, 'block')} are committed")
                return
            if state.events:
                state = self._ask(state)
                continue
            self._check_alive(state)
            self._say_why_nothing_runs(report, state)
            began = time.monotonic()
            time.sleep(_POLL)
            state = self.look()
            # A look that takes long is taken less often.
            time.sleep(min(10.0, 4 * max(0.0, time.monotonic() - began - _POLL)))

    def _check_alive(self, state: BackfillState) -> None:
        """Ends the command when nothing that is missing can come any more."""
        if state.queued or state.running or state.paused:
            self.idle_since = None
            return
        if state.failures:
            _give_up(f"{counted(state.failures, 'task')} failed; see `tracelake task show TASK`. {_resume()}")
        now = time.monotonic()
        self.idle_since = self.idle_since or now
        if now - self.idle_since > _STUCK_AFTER:
            missing = counted(state.blocks - state.committed_blocks, "block")
            _give_up(f"{missing} are missing, though nothing waits or runs: see `tracelake datasets gaps`")

    def _say_why_nothing_runs(self, report: Report, state: BackfillState) -> None:
        """Once for each reason: a paused job, no worker, a full cap of another kind."""
        if state.running or not (state.queued or state.paused):
            self.still_since = None
            return
        self.still_since = self.still_since or time.monotonic()
        if time.monotonic() - self.still_since < _STILL_AFTER:
            return
        if state.paused:
            paused = f"{state.paused[0].dag_name}/{state.paused[0].job}"
            why = f"{paused} is paused: `tracelake resume {paused}` lets it go on"
        else:
            why = self.client.ask(partial(_waiting_for, state))
        if why and why != self.waiting:
            report.say(f"waiting: {why}")
            self.waiting = why


def _retry_task(task: UUID, client: Client) -> None:
    client.retry(task)


def _trigger(source: JobName, event: Gap, client: Client) -> None:
    client.trigger(source.dag_name, source.job, start=event.start, end=event.end)


def _newest_task(job: JobName, client: Client) -> TaskPage:
    return client.tasks(dag=job.dag_name, job=job.job, limit=1)


def _waiting_for(state: BackfillState, client: Client) -> str:
    """Why the task that has waited longest of the last ones doesn't run."""
    page = client.tasks(dag=state.job.dag_name, job=state.job.job, status="Queued", limit=1)
    if not page.tasks:
        return ""
    return why_waiting(client.task(page.tasks[-1].task_id))


def why_waiting(task: TaskDetail) -> str:
    """With what went wrong the last time: that is what a person can do something about."""
    if task.waiting_for is None:
        return ""
    before = f", after: {task.error_message}" if task.error_message else ""
    return f"{task.waiting_for.message}{before}"


def _give_up(why: str) -> NoReturn:
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(ExitCode.FAILED)


def _resume() -> str:
    return "The same command shows how far it is, and goes on with what is missing"
