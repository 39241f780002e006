"""Audits after a run. A finding has the broken invariant, the expectation and the observation.

``AnswerAudit`` compares the answers to callers with earlier answers (invariants 3 and 8).

``audit_content`` compares what a reader sees in the end with the chain and with what was acknowledged
(invariants 2, 3, 7): no hole, no row of an abandoned fork, no scope that was never requested, nothing twice,
for every dataset of the active generation, from plain reads of committed cursors and partitions.

``audit_holds`` reads what the database has noted at the commit of every claim and every new task.

``FenceAudit`` checks that all accepted claims, heartbeats and completions can be true together (invariant 1).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from uuid import UUID

from tests.support.simulation.connection import SQL
from tests.support.simulation.graph import CHUNK, JOBS, RANGE, Layout
from tests.support.simulation.worker import MAX_OBJECT
from tests.support.simulation.world import Call, History, World
from tracelake.contracts.dispatcher_api import (
    ClaimResponse,
    CompleteRequest,
    CompleteResponse,
    EventsRequest,
    EventsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    TriggerRequest,
)
from tracelake.dispatcher.steps.deploy_dag import Deployed
from tracelake.domain.block_range import BlockRange
from tracelake.objects.base import ObjectPrefix

SAME_ANSWER = "3: the same request gets the same answer"
ONCE = "3: nothing is completed twice"
OLD_VERSION = "3: what a deploy has replaced moves nothing"
NO_EARLY_END = "8: nothing fails while it has attempts left"
MAX_ATTEMPTS = 3
EVERYTHING = 2**62
NOTHING_LOST = "2: no acknowledged event, trigger or completion is lost"
NOTHING_TWICE = "3: nothing counts twice"
CANONICAL = "7: committed rows are those of the canonical chain"
ONE_HOLDER = "1: an attempt has one holder, and only the current one acts"
HELD = "a held job's tasks are neither created nor claimed, and a full queue grows by running work alone"
CAP = "1: never more attempts at once than a job allows"
Attempt = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class Finding:
    invariant: str
    expected: str
    seen: str

    def __str__(self) -> str:
        return f"{self.invariant}\n  expected: {self.expected}\n  seen:     {self.seen}"


class AnswerAudit:
    def __init__(self, history: History) -> None:
        self._history = history
        self.findings: list[Finding] = []

    def run(self) -> list[Finding]:
        self._repeats()
        self._failures()
        self._versions()
        return self.findings

    def _report(self, invariant: str, expected: str, seen: str) -> None:
        self.findings.append(Finding(invariant, expected, seen))

    def _repeats(self) -> None:
        answered: dict[bytes, tuple[Call, str]] = {}
        for call in self._history.of("complete"):
            if call.answered is None:
                continue
            key = repr(call.request).encode()
            outcome = _outcome_of(call.answer)
            first = answered.setdefault(key, (call, outcome))
            # A canceled task's report changes nothing, so it isn't kept once the task is tried again.
            if first[1] != outcome and not first[1].startswith(("Stale", "Canceled")):
                self._report(SAME_ANSWER, f"{first[1]} again", outcome)
        done: dict[UUID, set[int]] = defaultdict(set)
        for call in self._history.of("complete"):
            if isinstance(call.answer, CompleteResponse) and call.answer.task_status == "Completed":
                done[call.answer.task_id].add(call.answer.attempt or 0)
        for task_id, attempts in done.items():
            if len(attempts) > 1:
                self._report(ONCE, f"{task_id} is completed by one attempt", f"by {sorted(attempts)}")

    def _failures(self) -> None:
        """A task that gave up had as many failures as it may have; releases and changed inputs are none."""
        for call in self._history.of("complete"):
            answer, request = call.answer, call.request
            if not (isinstance(answer, CompleteResponse) and answer.task_status == "Failed"):
                continue
            if answer.status != "Failed" or not request.retryable or self._retired(call):
                continue
            neutral = {
                other.request.attempt
                for other in self._history.of("complete")
                if other.request.task_id == request.task_id and _is_neutral(other)
            }
            if request.attempt - len(neutral) < MAX_ATTEMPTS:
                self._report(
                    NO_EARLY_END,
                    f"attempt {request.attempt} with {len(neutral)} neutral ones before it is tried again",
                    "it failed for good",
                )

    def _retired(self, call: Call) -> bool:
        return any(c.issued < (call.answered or 0) for c in self._history.of("deploy")[1:])

    def _versions(self) -> None:
        """The same lineage is the same dataset version; word of another version is only kept."""
        versions: dict[str, UUID] = {}
        for call in self._history.of("deploy"):
            if isinstance(call.answer, Deployed):
                for job, outputs in call.answer.jobs.items():
                    lineage = call.request.lineage(job)
                    if versions.setdefault(lineage, outputs[0].dataset_version) != outputs[0].dataset_version:
                        self._report(SAME_ANSWER, f"{lineage} has one version", "it has two")
        written = {
            UUID(int=call.answer.task_id.int): call.answer.task.outputs[0].dataset_version
            for call in self._history.of("claim")
            if isinstance(call.answer, ClaimResponse) and call.answer.task is not None
        }
        for call in self._history.of("events"):
            if isinstance(call.answer, EventsResponse):
                own = written.get(call.request.task_id)
                for event, kept in zip(call.request.events, call.answer.events, strict=True):
                    other = own is not None and event.dataset_version != own
                    if other and kept.state != "old_version":
                        self._report(OLD_VERSION, "an event of an old version is only kept", kept.state)


def _outcome_of(answer: object) -> str:
    if isinstance(answer, CompleteResponse):
        return f"{answer.status} {answer.task_status} {answer.retry_at}"
    return getattr(answer, "reason", type(answer).__name__)


def _is_neutral(call: Call) -> bool:
    if isinstance(call.answer, CompleteResponse):
        return call.answer.status == "Released"
    return getattr(call.answer, "reason", None) == "InputChanged"


async def audit_content(world: World) -> list[Finding]:
    deployed = world.history.of("deploy")[-1].answer
    assert isinstance(deployed, Deployed), deployed
    findings: list[Finding] = []
    for job in JOBS:
        if job in world.layout.jobs:
            version = deployed.jobs[job][0].dataset_version
            if job == "gather":
                findings += await _audit_gathered(world, version, deployed.jobs["ingest"][0].dataset_version)
            else:
                findings += await _audit_job(world, job, version)
    return findings


async def audit_holds(world: World) -> list[Finding]:
    rows = await world.observer.read(SQL.violations)
    return [Finding(HELD, "none of it", f"{row['name']}: {row['what']} at {row['at']}") for row in rows]


async def _audit_job(world: World, job: str, version: UUID) -> list[Finding]:
    match job:
        case "head" | "derive" | "derive2":
            return await _audit_rows(world, job, version, world.chain.tip)
        case "tail":
            return await _audit_rows(world, job, version, _last_range_end(world))
        case "log":
            return await _audit_log(world, version)
        case "ask" | "split" | "ingest" | "sum":
            return await _audit_asked(world, job, version)
        case _:
            ranges = [BlockRange(s, s + RANGE - 1) for s in range(0, _last_range_end(world), RANGE)]
            return await _audit_partitions(world, job, version, ranges, ranges)


def _last_range_end(world: World) -> int:
    return (world.chain.tip + 1) // RANGE * RANGE - 1


async def _cursor(world: World, version: UUID) -> int:
    rows = await world.observer.read(SQL.reader_cursor, version)
    cursor: int = rows[0]["cursor"] if rows else -1
    return cursor


async def _audit_rows(world: World, job: str, version: UUID, last: int) -> list[Finding]:
    cursor = await _cursor(world, version)
    if cursor != last:
        return [Finding(NOTHING_LOST, f"{job} is committed up to {last}", f"up to {cursor}")]
    rows = world.data.table(version).rows
    seen = {block: row for block, row in rows.items() if block <= cursor}
    return _compare(world, job, range(last + 1), seen)


def _compare(world: World, job: str, blocks: Iterable[int], seen: dict[int, str]) -> list[Finding]:
    expected = {block: world.layout.expected(job, block, world.chain.content) for block in blocks}
    if seen == expected:
        return []
    wrong = sorted(b for b in expected.keys() | seen.keys() if expected.get(b) != seen.get(b))
    return [
        Finding(
            CANONICAL,
            f"{job}: " + ", ".join(f"{b}: {expected.get(b)}" for b in wrong),
            ", ".join(f"{b}: {seen.get(b)}" for b in wrong),
        )
    ]


async def _audit_log(world: World, version: UUID) -> list[Finding]:
    """An appended log keeps what was true once; it must have all that is true now."""
    cursor = await _cursor(world, version)
    if cursor < world.chain.tip:
        return [Finding(NOTHING_LOST, f"log is committed up to {world.chain.tip}", f"up to {cursor}")]
    ever = world.data.table(version).ever
    missing = [
        block
        for block in range(world.chain.tip + 1)
        if (block, world.layout.expected("log", block, world.chain.content)) not in ever
    ]
    return [Finding(CANONICAL, "log has every block", f"{missing} are missing")] if missing else []


async def _audit_gathered(world: World, version: UUID, chunks: UUID) -> list[Finding]:
    """Chunks come in any order: what is there before the first gap must have been read, and no row is wrong."""
    needed: set[int] = set()
    for chunk in await world.observer.read(SQL.committed_partitions, chunks, 0, EVERYTHING):
        if needed and chunk["range_start"] != max(needed) + 1:
            break
        needed |= set(range(chunk["range_start"], chunk["range_end"] + 1))
    rows = world.data.table(version).rows
    return _compare(world, "gather", sorted(needed | rows.keys()), rows)


async def _audit_asked(world: World, job: str, version: UUID) -> list[Finding]:
    size = None if job == "ask" else CHUNK
    triggers = world.history.of("trigger")
    accepted = _scopes([call.request for call in triggers if call.accepted], size)
    ever = _scopes([call.request for call in triggers], size)
    return await _audit_partitions(world, job, version, accepted, ever)


def _scopes(requests: Iterable[TriggerRequest], size: int | None) -> list[BlockRange]:
    found: set[BlockRange] = set()
    for request in requests:
        assert request.start is not None
        assert request.end is not None
        asked = BlockRange(request.start, request.end)
        found |= set(asked.split_on_grid(size)) if size else {asked}
    return sorted(found)


async def _audit_partitions(
    world: World, job: str, version: UUID, needed: list[BlockRange], allowed: list[BlockRange]
) -> list[Finding]:
    rows = await world.observer.read(SQL.committed_partitions, version, 0, EVERYTHING)
    seen = [BlockRange(row["range_start"], row["range_end"]) for row in rows]
    keys = ", ".join(span.partition_key for span in seen)
    findings = []
    if missing := [span for span in needed if span not in seen]:
        wanted = ", ".join(span.partition_key for span in missing)
        findings.append(Finding(NOTHING_LOST, f"{job} has {wanted}", keys or "nothing"))
    if extra := [span for span in seen if span not in allowed]:
        unwanted = ", ".join(span.partition_key for span in extra)
        findings.append(Finding(CANONICAL, f"{job} has no {unwanted}", keys))
    stored = JOBS[job].storage == "parquet"
    overlapping = any(one.end >= two.start for one, two in pairwise(seen))
    if (stored and overlapping) or len(set(seen)) != len(seen):
        findings.append(Finding(NOTHING_TWICE, f"{job}'s partitions don't overlap", keys))
    if stored:
        for span, row in zip(seen, rows, strict=True):
            content: dict[int, str] = {}
            for stat in await world.objects.list(ObjectPrefix.parse(row["location"])):
                read = json.loads(await world.objects.read(stat.location, MAX_OBJECT))
                content |= {int(block): text for block, text in read.items()}
            findings += _compare(world, job, range(span.start, span.end + 1), content)
    return findings


@dataclass(slots=True)
class Held:
    """An attempt as its holder knows it: from the answer to its claim until its end."""

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
            # An echo's answer is lost: its lease is real, but no worker works on it.
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
        """Every accepted completion, heartbeat and event came from the holder of the fence."""
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
        """Attempts that certainly ran at the same time, by the answers to their holders."""
        by_job: dict[UUID, list[Held]] = defaultdict(list)
        by_task: dict[UUID, list[Held]] = defaultdict(list)
        for (task_id, _), held in self._held.items():
            by_job[UUID(int=held.version.int)].append(held)
            by_task[task_id].append(held)
        by_operator: dict[str, list[Held]] = defaultdict(list)
        for held in self._held.values():
            by_operator[JOBS[held.job].operator].append(held)
        for group in by_task.values():
            self._check_overlap(group, 1, ONE_HOLDER)
        for operator, most in self._layout.operators.items():
            self._check_overlap(by_operator[operator], most, CAP)
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
    return any(answered < at and expires > when for answered, expires in held.leases)
