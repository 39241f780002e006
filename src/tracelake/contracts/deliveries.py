"""The wire models of deliveries: the calls of the delivery process, and what people see and do.

The process holds its delivery's task under a lease, reads rows, and asks the Dispatcher for everything that must
outlive it: which messages there are, that one is about to be sent, and how that ended. Each call carries the
task's fence and may be repeated.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.dispatcher_api import Attempt
from tracelake.contracts.manifest import Count
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import DeliverySpec

LOAD_PATH = "/internal/delivery-load"
PLAN_PATH = "/internal/delivery-plan"
REPORT_PATH = "/internal/delivery-report"
#: The queue of wake-ups for delivery tasks.
DELIVERY_QUEUE = "delivery"
MAX_ROWS = 1000
MAX_OUTCOMES = 1000
MAX_WAITING = 5000
"""Messages that a delivery process keeps at hand; further rows wait in their dataset."""
MAX_MESSAGE_BYTES = 256 * 1024
MAX_PLAN_BYTES = 8 * 1024 * 1024
MAX_ERROR_CHARS = 500
MAX_SKIPPED = 1000
MAX_PRODUCERS = 1000
"""Producers whose rows may wait for finality while others go on."""

RecordId = Annotated[str, Meta(min_length=1, max_length=80)]
#: A schema that declares it may count from below zero.
Revision = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MessageId = Annotated[int, Meta(ge=1, le=2**63 - 1)]
MessageKind = Literal["row", "retracted"]
MessageState = Literal["waiting", "sent", "dead", "dropped", "unchanged"]
TryVerdict = Literal["sent", "failed", "dead", "gone", "blocked"]


class DeliveryConfig(Struct, frozen=True):
    """The ``config`` of a delivery task's payload, as it was at the claim. ``definition`` changes with the DAG
    file, the schema's new columns included."""

    delivery_id: UUID
    dag_name: str
    dataset_version: UUID
    definition: str
    spec: DeliverySpec
    schema: BufferSchema


class DeliveryMessage(Struct, frozen=True):
    """One message to send. ``data`` is the row as JSON; ``text`` what its template made of it, with its
    values marked, or None without one; ``wait_seconds`` the time until its next try."""

    message_id: int
    record_id: str
    revision: int
    made_at: int
    kind: MessageKind
    order_key: str
    data: str
    text: str | None
    row_at: datetime
    tries: int
    wait_seconds: float


class FinalityWait(Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of a producer that wait, from the first one beyond ``position``; ``block`` is that one's, if known."""

    producer: Annotated[str, Meta(max_length=1000)]
    position: Count
    block: Count | None = None


Waits = Annotated[list[FinalityWait], Meta(max_length=MAX_PRODUCERS)]


class DeliveryLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """``begin`` once per attempt: what an earlier attempt was sending may have arrived. ``trouble``: why nothing is
    sent, if the cause is none of a message; ``ready``: there is no such cause. ``holds``: the messages that the
    process has, so that what it doesn't have is answered again if an answer was lost; a process of the version
    before doesn't name them, and gets each message once."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    begin: bool = False
    limit: Annotated[int, Meta(ge=0, le=MAX_WAITING)] = MAX_WAITING
    trouble: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] | None = None
    ready: bool = False
    holds: Annotated[list[MessageId], Meta(max_length=MAX_WAITING)] | UnsetType = UNSET


class DeliveryLoaded(Struct, frozen=True):
    """``messages`` are those that the attempt doesn't have yet. ``finalized`` has the last final block for each
    producer whose chain is known, ``heads`` the head that is known of it. ``waits``: of these producers, rows
    before the position aren't messages yet. ``resumed_at``: when a person last resumed the delivery; what waited
    for another try then waits no more."""

    position: int
    definition: str
    messages: list[DeliveryMessage]
    finalized: dict[str, int]
    heads: dict[str, int] = {}
    waits: list[FinalityWait] = []
    resumed_at: datetime | None = None


class PlannedRow(Struct, frozen=True, forbid_unknown_fields=True):
    """``refused``: why the row can't become a message; it is a dead letter at once."""

    record_id: RecordId
    revision: Revision
    made_at: Count
    order_key: Annotated[str, Meta(max_length=4096)]
    data: str
    row_at: datetime
    text: str | None = None
    refused: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] | None = None


class GoneRow(Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose row was retracted, or no longer fulfils ``where``."""

    record_id: RecordId
    revision: Revision
    made_at: Count


class DeliveryPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of the positions ``(after, upto]``, but for those of producers that wait; or, if these are the same
    position, rows of one that did. ``waited`` and ``waits`` are the producers before and after; without them, they
    stay as they are."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    after: Count
    upto: Count
    rows: Annotated[list[PlannedRow], Meta(max_length=MAX_ROWS)] = []
    gone: Annotated[list[GoneRow], Meta(max_length=MAX_ROWS)] = []
    waited: Waits | UnsetType = UNSET
    waits: Waits | UnsetType = UNSET


class DeliveryPlanned(Struct, frozen=True):
    """``messages`` are to be sent; ``dropped`` no longer."""

    messages: list[DeliveryMessage]
    dropped: list[int]


class TryOutcome(Struct, frozen=True, forbid_unknown_fields=True):
    """How a try ended. ``in_doubt``: the receiver may have got it all the same. ``gone``: it wants no more.
    ``blocked``: its address can't be used, so the message wasn't tried."""

    message_id: MessageId
    result: TryVerdict
    in_doubt: bool = False
    status: Annotated[int, Meta(ge=0, le=999)] | None = None
    error: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] | None = None
    delay_seconds: Annotated[float, Meta(ge=0, le=7 * 86400)] = 0


class DeliveryReport(Struct, frozen=True, forbid_unknown_fields=True):
    """``starting`` are tries that begin once this is answered."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    outcomes: Annotated[list[TryOutcome], Meta(max_length=MAX_OUTCOMES)] = []
    starting: Annotated[list[MessageId], Meta(max_length=MAX_OUTCOMES)] = []


class DeliveryReported(Struct, frozen=True):
    """``started`` of the tries may begin; the messages of the others aren't to be sent, unless the delivery is
    ``paused``: then none begins, and all of them wait."""

    started: list[int]
    dropped: list[int]
    paused: bool = False


class WaitingProducer(Struct, frozen=True):
    """The next row of ``producer`` waits for its ``block`` to be final, and has since then."""

    producer: str
    block: int
    since: datetime


class DeadMessage(Struct, frozen=True):
    """A message that was given up: why, and when."""

    message_id: int
    error: str | None
    at: datetime | None


class DeliverySummary(Struct, frozen=True):
    """``status`` is ``sending``, ``waiting`` (for a delivery process), ``paused``, ``gone`` (the receiver answered
    410; resume to try again), ``failing`` or ``removed``. ``behind`` counts positions of the dataset from the
    first row that no message was made of yet; ``waits_for``: of which producers rows wait to be final.
    ``replayable`` of the ``dead`` letters can be sent again; ``too_large`` has the ids of those that never can, the
    oldest ten."""

    dag_name: str
    name: str
    dataset: str
    to: str
    when: str
    where: str | None
    status: str
    paused_by: list[str]
    waiting: int
    sent: int
    retracted: int
    dead: int
    behind: int
    oldest_seconds: float | None
    failing_since: datetime | None
    last_error: str | None
    last_error_at: datetime | None
    last_sent_at: datetime | None
    task_id: UUID | None
    task_status: str | None
    waits_for: list[WaitingProducer] = []
    newest_dead: DeadMessage | None = None
    replayable: int = 0
    too_large: list[int] = []


class DeliveryPage(Struct, frozen=True):
    deliveries: list[DeliverySummary]


class MessageSummary(Struct, frozen=True):
    message_id: int
    id: str
    revision: int
    kind: str
    state: str
    tries: int
    status: int | None
    error: str | None
    created_at: datetime
    next_try_at: datetime | None
    finished_at: datetime | None


class DeliveryDetail(DeliverySummary, frozen=True, kw_only=True):
    """``messages``: newest first."""

    template: str | None
    key: str | None
    messages: list[MessageSummary]


class DeliveryQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``state`` leaves out messages in other states."""

    state: MessageState | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=0, le=1000)] = 20


class ReplayMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """Without ids, all dead letters of the delivery."""

    message_ids: Annotated[list[MessageId], Meta(min_length=1, max_length=1000)] | None = None


class SkippedMessage(Struct, frozen=True):
    """A message that isn't sent again: its state now, and why."""

    message_id: int
    state: str
    error: str | None


class MessagesReplayed(Struct, frozen=True):
    """``skipped``: those that were asked for, or all dead letters, that aren't sent again; a thousand at most."""

    replayed: int
    skipped: list[SkippedMessage] = []


class DropMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """Drop these dead letters, or all of the delivery's with ``all``; a request without either drops nothing."""

    message_ids: Annotated[list[MessageId], Meta(min_length=1, max_length=1000)] | None = None
    all: bool = False


class MessagesDropped(Struct, frozen=True):
    """``not_dead``: the ids of the request that are no dead letters, so nothing was done with them."""

    dropped: int
    not_dead: list[int] = []


class DeliveryPaused(Struct, frozen=True):
    """The causes for which it is paused now."""

    paused_by: list[str]
