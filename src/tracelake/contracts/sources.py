"""Wire models of sources: the scheduler's on the internal port, and people's on the user port.

A tick is a scheduled time of a cron source, in epoch seconds; it exists once. A scheduler asks what is scheduled,
decides which ticks are due (``domain/schedule.py``) and sends them; any of these calls may be repeated.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.dispatcher_api import BlockNumber, ShortText
from tracelake.contracts.user_api import PageLimit
from tracelake.domain.dag.model import CatchUp

SCHEDULES_PATH = "/internal/schedules"
TICKS_PATH = "/internal/ticks"
SOURCE_BODY_PATH = "/internal/source-body"
TASK_SOURCE_BODY_PATH = "/v1/task/source-body"
MAX_TICKS = 200
SCHEDULER_LEASE_SECONDS = 10.0
"""A scheduler that hasn't asked for this long doesn't act any more."""
MAX_HOOK_BYTES = 256 * 1024
"""The largest body of a delivery."""
MAX_INLINE_BODY = 32 * 1024
"""A larger one isn't in the task's payload: the task reads it by ``TASK_SOURCE_BODY_PATH``."""
DEFAULT_OVERLAP_SECONDS = 24 * 3600


class SchedulesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``release``: this scheduler stops, and another one may act at once."""

    scheduler_id: ShortText
    release: bool = False


class ScheduledSource(Struct, frozen=True):
    """A cron source. Ticks up to ``after`` exist already, or are from before its deploy."""

    dag_name: str
    job: str
    schedule: str
    timezone: str
    catch_up: CatchUp
    after: datetime


class SchedulesResponse(Struct, frozen=True):
    """``now`` is the state database's time. A scheduler that isn't ``acting`` gets no sources: another one acts."""

    acting: bool
    now: datetime
    sources: list[ScheduledSource] = []


class TickIn(Struct, frozen=True, forbid_unknown_fields=True):
    dag_name: ShortText
    job: ShortText
    tick: BlockNumber


class TicksRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Ticks of one source in their order."""

    ticks: Annotated[list[TickIn], Meta(min_length=1, max_length=MAX_TICKS)]


TickState = Literal["accepted", "kept", "known", "early", "unknown"]


class TickOut(Struct, frozen=True):
    """``accepted``: it became an event or a task. ``kept``: it will, when its source may go on. ``known``: it, or
    a later one, exists already. ``early``: its time hasn't come. ``unknown``: there is no such cron source."""

    dag_name: str
    job: str
    tick: int
    state: TickState
    event_id: int | None = None
    tasks_created: int = 0


class TicksResponse(Struct, frozen=True):
    ticks: list[TickOut]


class SourceQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: PageLimit = 100
    after: ShortText | UnsetType = UNSET


class SourceSummary(Struct, frozen=True, kw_only=True):
    """A source as it is deployed. ``runs_code``: each of its ticks, deliveries or triggers is a task; without code
    it is an event on output 0. ``waiting`` is how many are kept, up to 10,000: while it is paused or held, or
    ``waiting_for`` says why. ``last_tick`` is in epoch seconds, ``last_number`` counts deliveries or triggers."""

    dag_name: str
    job: str
    kind: str
    runs_code: bool
    operator: str
    runtime: str
    paused: bool
    pause_causes: list[str] = []
    waiting: int = 0
    waiting_for: str | None = None
    schedule: str | None = None
    timezone: str | None = None
    catch_up: str | None = None
    signature: str | None = None
    since: datetime | None = None
    last_tick: int | None = None
    last_number: int | None = None
    last_at: datetime | None = None


class SourcePage(Struct, frozen=True):
    """``now`` is the time by which ticks are made."""

    now: datetime
    sources: list[SourceSummary]
    next: str | None


class SourceRan(Struct, frozen=True):
    """A tick that a person made. ``kept``: its source is paused or held, or has no room, so it waits."""

    dag_name: str
    job: str
    tick: int
    kept: bool
    event_id: int | None
    tasks_created: int


class DeliveryAccepted(Struct, frozen=True):
    """``number`` counts the source's deliveries. ``known``: this delivery was accepted before; nothing happened."""

    number: int
    known: bool = False
    kept: bool = False


class SecretRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``rotate``: make a new one; those before it are accepted for ``overlap_seconds`` more at most, with 0 not at
    all."""

    rotate: bool = False
    overlap_seconds: Annotated[int, Meta(ge=0, le=30 * 24 * 3600)] = DEFAULT_OVERLAP_SECONDS


class WebhookSecret(Struct, frozen=True):
    """Shown once. ``previous_until``: how long the one before is still accepted."""

    dag_name: str
    job: str
    path: str
    signature: str
    secret: str
    previous_until: datetime | None = None

    def __repr__(self) -> str:
        return f"WebhookSecret({self.dag_name}/{self.job}, …)"
