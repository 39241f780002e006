"""Who was told that they hold, extend and finish what, and whether all of it can be true (invariant 1)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from tracelake.contracts.dispatcher_api import (
    ClaimResponse,
    CompleteRequest,
    CompleteResponse,
    EventsRequest,
    HeartbeatRequest,
    HeartbeatResponse,
)
from tracelake.testing.simulation.findings import Finding
from tracelake.testing.simulation.graph import JOBS, Layout
from tracelake.testing.simulation.history import Call, History

ONE_HOLDER = "1: an attempt has one holder, and only the current one acts"
CAP = "1: never more attempts at once than a job allows"

Attempt = tuple[UUID, int]


@dataclass(slots=True)
class Held:
    """An attempt as its holder knows it: from being told of the claim until it, or somebody, ended it."""

    job: str
    version: UUID
    claimed: Call
    token: UUID
    epoch: int
    cursor: bool
    leases: list[tuple[int, datetime]] = field(default_factory=list)
    over: int | None = None


class FenceAudit:
    def __init__(self, history: History, layout: Layout) -> None:
        self._history = history
        self._layout = layout
        self.findings: list[Finding] = []
        self._held: dict[Attempt, Held] = {}

    def run(self) -> list[Finding]:
        self._claims()
        self._ends()
        self._actions()
        self._overlaps()
        return self.findings

    def _report(self, invariant: str, expected: str, seen: str) -> None:
        self.findings.append(Finding(invariant, expected, seen))

    def _claims(self) -> None:
        for call in self._history.of("claim"):
            answer = call.answer
            if not isinstance(answer, ClaimResponse) or answer.task is None or answer.lease_token is None:
                continue
            assert answer.attempt is not None
            assert answer.task.epoch is not None
            key = (UUID(int=answer.task_id.int), answer.attempt)
            known = self._held.get(key)
            if known is not None and known.token != answer.lease_token:
                self._report(ONE_HOLDER, f"attempt {key} has one lease", "two were handed out")
            if known is None:
                first = answer.task.outputs[0]
                cursor = JOBS[answer.task.job.name].strategy == "PerUpdate"
                known = Held(
                    answer.task.job.name,
                    first.dataset_version,
                    call,
                    answer.lease_token,
                    answer.task.epoch,
                    cursor,
                )
                self._held[key] = known
            # An echo's answer goes nowhere: its lease is real, but nobody is told to work on it.
            if not call.echo and answer.lease_expires_at is not None and call.answered is not None:
                known.leases.append((call.answered, answer.lease_expires_at))
        for (task_id, attempt), held in self._held.items():
            later = self._held.get((task_id, attempt + 1))
            if later is not None and later.epoch <= held.epoch:
                self._report(ONE_HOLDER, "epochs rise with attempts", f"{held.epoch} then {later.epoch}")

    def _ends(self) -> None:
        """From when on an attempt may be over: the first call that could have ended it, answered or not."""
        for call in self._history.of("complete", "cancel", "deploy", "heartbeat"):
            match call.request:
                case CompleteRequest(task_id=task_id, attempt=int(attempt)) if self._is_fence(call.request):
                    self._over((task_id, attempt), call)
                case HeartbeatRequest(task_id=task_id, attempt=attempt):
                    if isinstance(call.answer, HeartbeatResponse):
                        held = self._held.get((task_id, attempt))
                        expires = call.answer.lease_expires_at
                        if held is not None and call.answered is not None and expires is not None:
                            held.leases.append((call.answered, expires))
                case UUID() as canceled:
                    for key in self._held:
                        if key[0] == canceled:
                            self._over(key, call)
                case _:
                    for key in self._held:
                        self._over(key, call)

    def _over(self, key: Attempt, call: Call) -> None:
        held = self._held.get(key)
        if held is None or held.claimed.issued > call.finished:
            return
        position = max(call.issued, held.claimed.answered or 0)
        if held.over is None or position < held.over:
            held.over = position

    def _actions(self) -> None:
        """Whoever was told that they finished, extended or published something held the fence."""
        for call in self._history.of("complete", "heartbeat", "events"):
            if not call.accepted:
                continue
            request = call.request
            assert isinstance(request, CompleteRequest | HeartbeatRequest | EventsRequest)
            if isinstance(call.answer, HeartbeatResponse) and call.answer.cancel:
                continue
            if isinstance(call.answer, CompleteResponse) and call.answer.status == "Canceled":
                continue
            assert request.attempt is not None
            held = self._held.get((request.task_id, request.attempt))
            if held is None:
                if isinstance(request, CompleteRequest):
                    self._unknown_holder(request)
                continue
            if request.lease_token is not None and request.lease_token != held.token:
                self._report(ONE_HOLDER, f"{call.kind} with a token nobody was given is refused", "accepted")
            if not self._is_repeat(call):
                self._check_current(call, request.task_id, request.attempt)
            if isinstance(request, HeartbeatRequest):
                self._check_not_over(call, request)

    def _is_fence(self, request: CompleteRequest) -> bool:
        """Does the report carry the lease of the attempt that it names? A canceled task needs no lease to be
        reported as canceled: such a report is answered, also one for an attempt that never was, and ends none."""
        assert request.attempt is not None
        held = self._held.get((request.task_id, request.attempt))
        return held is not None and held.token == request.lease_token

    def _check_not_over(self, call: Call, request: HeartbeatRequest) -> None:
        for end in self._history.of("complete"):
            if not self._is_fence(end.request):
                continue
            same = (end.request.task_id, end.request.attempt) == (request.task_id, request.attempt)
            if same and end.accepted and end.answered is not None and end.answered < call.issued:
                self._report(ONE_HOLDER, "a heartbeat after the end is refused", "the lease was extended")

    def _unknown_holder(self, request: CompleteRequest) -> None:
        tokens = {h.token for (task_id, _), h in self._held.items() if task_id == request.task_id}
        if request.lease_token in tokens:
            self._report(
                ONE_HOLDER, "a completion for another attempt than its lease's is refused", "accepted"
            )

    def _check_current(self, call: Call, task_id: UUID, attempt: int) -> None:
        for (other, number), held in self._held.items():
            if other == task_id and number > attempt and (held.claimed.answered or 0) < call.issued:
                self._report(
                    ONE_HOLDER,
                    f"{call.kind} of attempt {attempt} is refused once attempt {number} was claimed",
                    "accepted",
                )
        if call.kind != "complete" or call.request.status != "Completed":
            return
        canceled = [
            c for c in self._history.of("cancel") if c.request == task_id and c.accepted and c.answered
        ]
        for cancel in canceled:
            assert cancel.answered is not None
            retried = any(
                c.request == task_id and c.finished > cancel.issued and c.issued < (call.answered or 0)
                for c in self._history.of("retry")
            )
            if cancel.answered < call.issued and not retried:
                self._report(ONE_HOLDER, "a canceled task can't be completed", f"{task_id} was completed")

    def _is_repeat(self, call: Call) -> bool:
        return call.kind == "complete" and any(
            other is not call and other.request == call.request and other.issued < call.issued
            for other in self._history.of("complete")
        )

    def _overlaps(self) -> None:
        """Attempts that certainly ran at the same time, by what their holders were told."""
        by_job: dict[UUID, list[Held]] = defaultdict(list)
        by_task: dict[UUID, list[Held]] = defaultdict(list)
        for (task_id, _), held in self._held.items():
            by_job[UUID(int=held.version.int)].append(held)
            by_task[task_id].append(held)
        for group in by_task.values():
            self._check_overlap(group, 1, ONE_HOLDER)
        for group in by_job.values():
            cap = 1 if group[0].cursor else self._layout.caps.get(group[0].job)
            if cap is not None:
                self._check_overlap(group, cap, CAP)

    def _check_overlap(self, group: list[Held], cap: int, invariant: str) -> None:
        for held in group:
            at, when = held.claimed.answered, held.claimed.answered_at
            if at is None or when is None or not held.leases:
                continue
            alive = [other for other in group if other is held or _certainly_runs(other, at, when)]
            if len(alive) > cap:
                self._report(
                    invariant,
                    f"at most {cap} of {held.job} at once",
                    f"{len(alive)} when epoch {held.epoch} was claimed: {sorted(h.epoch for h in alive)}",
                )


def _certainly_runs(held: Held, at: int, when: datetime) -> bool:
    claimed = held.claimed.answered
    if claimed is None or claimed > at or (held.over is not None and held.over <= at):
        return False
    return any(told < at and expires > when for told, expires in held.leases)
