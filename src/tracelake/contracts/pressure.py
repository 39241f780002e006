"""The user surface's wire models for backpressure: what waits, who holds whom, and what ends it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from msgspec import Struct


class JobPressure(Struct, frozen=True, kw_only=True):
    """A job with thresholds. ``pressure`` is the larger of waiting tasks and age of the oldest, each divided by its
    threshold. ``holds`` says what is held upstream because of it: nothing (null), ``bulk`` work, or everything
    (``normal``)."""

    dag_name: str
    job: str
    priority: str
    pressure: float
    waiting: int
    max_queue_depth: int | None
    oldest_seconds: float | None
    max_queue_age_seconds: int | None
    paused_by_person: bool
    holds: Literal["bulk", "normal"] | None
    since: datetime | None


class HeldJob(Struct, frozen=True, kw_only=True):
    """A job that is held because of another one, ``cause``. With ``bulk_only``, only its bulk work is held.
    ``chain`` has the jobs from it down to the cause. It is released when the cause has fewer waiting tasks than
    ``released_below`` and none that has waited for ``released_below_seconds``, and not before
    ``at_least_seconds`` have passed; ``message`` says all of it."""

    dag_name: str
    job: str
    cause_dag: str
    cause_job: str
    bulk_only: bool
    since: datetime
    chain: list[str]
    released_below: int | None
    released_below_seconds: float | None
    message: str
    at_least_seconds: float = 0


class KeptWork(Struct, frozen=True, kw_only=True):
    """A job that isn't held, and ``kept`` scopes, events or requests that wait for room in a queue, up to 10,000 of
    each: its own, or that of a consumer, ``full_job``. They are routed as its tasks are claimed; ``message`` says
    all of it."""

    dag_name: str
    job: str
    kept: int
    full_dag: str | None
    full_job: str | None
    message: str


class OperatorLoad(Struct, frozen=True):
    """Running tasks of an operator over all DAGs, and the maximum if there is one."""

    operator: str
    running: int
    max_in_flight: int | None


class PressureReport(Struct, frozen=True):
    jobs: list[JobPressure]
    holds: list[HeldJob]
    operators: list[OperatorLoad] = []
    backlogs: list[KeptWork] = []
