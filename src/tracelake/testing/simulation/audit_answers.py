"""What callers were told, against what they were told before (invariants 3 and 8)."""

from __future__ import annotations

from collections import defaultdict
from uuid import UUID

from tracelake.contracts.dispatcher_api import ClaimResponse, CompleteResponse, EventsResponse
from tracelake.dispatcher.steps.deploy_dag import Deployed
from tracelake.testing.simulation.findings import Finding
from tracelake.testing.simulation.history import Call, History

SAME_ANSWER = "3: the same request gets the same answer"
ONCE = "3: nothing is completed twice"
OLD_VERSION = "3: what a deploy has replaced moves nothing"
NO_EARLY_END = "8: nothing fails while it has attempts left"
MAX_ATTEMPTS = 3


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
            told = _told(call.answer)
            first = answered.setdefault(key, (call, told))
            # A canceled task's report changes nothing, so nobody remembers it once the task is tried again.
            if first[1] != told and not first[1].startswith(("Stale", "Canceled")):
                self._report(SAME_ANSWER, f"{first[1]} again", told)
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


def _told(answer: object) -> str:
    if isinstance(answer, CompleteResponse):
        return f"{answer.status} {answer.task_status} {answer.retry_at}"
    return getattr(answer, "reason", type(answer).__name__)


def _is_neutral(call: Call) -> bool:
    if isinstance(call.answer, CompleteResponse):
        return call.answer.status == "Released"
    return getattr(call.answer, "reason", None) == "InputChanged"
