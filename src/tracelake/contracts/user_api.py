"""The user surface's wire models: the requests of people, the command line and CI, and the answers.

Lists are pages: ``next`` is the ``after`` of the following page, and null at the end. Callers must treat it as
opaque. A query field that isn't given is unset and never null: in a query string ``null`` is a name like any other.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.dispatcher_api import ShortText
from tracelake.contracts.manifest import Block, ChainEdges

PageLimit = Annotated[int, Meta(ge=1, le=1000)]
Sequence = Annotated[int, Meta(ge=1, le=2**63 - 1)]
VersionNumber = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TaskStatusName = Literal["Queued", "Running", "Completed", "Failed", "Canceled"]


class DeployedOutput(Struct, frozen=True):
    output_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    dataset: str | None


class DeployedJob(Struct, frozen=True):
    name: str
    outputs: list[DeployedOutput]


class DeployedBuffer(Struct, frozen=True):
    """A buffered dataset. A publish may give ``schema_hash`` to be refused if the schema has changed."""

    dataset: str
    dataset_uuid: UUID
    dataset_version: UUID
    schema_hash: str


class DagWarning(Struct, frozen=True):
    """A place of a DAG file that is valid, and likely to be a mistake."""

    line: int
    column: int
    field: str
    message: str


class DeployResponse(Struct, frozen=True):
    dag_name: str
    dag_version: int
    jobs: list[DeployedJob]
    buffers: list[DeployedBuffer] = []
    warnings: list[DagWarning] = []


class PlannedOutput(Struct, frozen=True):
    index: int
    name: str
    storage: str
    dataset: str | None
    version: str


class PlannedJob(Struct, frozen=True):
    dag: str
    job: str
    kind: str
    because: list[str]
    outputs: list[PlannedOutput]


class PlannedName(Struct, frozen=True):
    name: str
    kind: str
    before: str | None
    after: str | None
    because: list[str] = []


class PlannedDelivery(Struct, frozen=True):
    name: str
    kind: str
    because: list[str] = []


class PlanResponse(Struct, frozen=True):
    """The effect of deploying this file; ``text`` is the same plan for people."""

    dag: str
    changes_nothing: bool
    jobs: list[PlannedJob]
    publish: list[PlannedName]
    text: str
    deliver: list[PlannedDelivery] = []
    warnings: list[DagWarning] = []


class DagQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: PageLimit = 100
    after: ShortText | UnsetType = UNSET


class JobSummary(Struct, frozen=True):
    name: str
    activation: str
    source_kind: str | None
    operator: str
    runtime: str
    execution_strategy: str | None
    priority: str
    paused: bool
    paused_by: str | None = None
    paused_at: datetime | None = None
    pause_causes: list[str] = []


class DagSummary(Struct, frozen=True):
    dag_name: str
    dag_version: int
    deployed_at: datetime
    jobs: list[JobSummary]


class DagPage(Struct, frozen=True):
    dags: list[DagSummary]
    next: str | None


class DagVersionQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: PageLimit = 100
    after: VersionNumber | UnsetType = UNSET


class DagVersionSummary(Struct, frozen=True):
    """A file as it was deployed; it never changes. One of a DAG's versions is active."""

    version: int
    active: bool
    jobs: int
    created_at: datetime
    created_by: str


class DagVersionPage(Struct, frozen=True):
    """Newest first."""

    dag_name: str
    active_version: int
    versions: list[DagVersionSummary]
    next: str | None


class DagVersionDetail(DagVersionSummary, frozen=True, kw_only=True):
    dag_name: str
    yaml: str


class ChainStatus(Struct, frozen=True, kw_only=True):
    """One follower. ``state`` is its ``condition`` in words; ``since`` is when that began. The numbers are those of
    its last report, ``known_age_seconds`` old: ``tip`` is the last block in its tables, ``lag`` the number of
    blocks that the chain has beyond it, and ``lag_seconds`` the time between the two blocks. ``head_age_seconds``
    is the age of the head's own timestamp. ``last_error`` is what is wrong now, or what the last attempt failed
    with, until the one that runs has read the head."""

    dag_name: str
    job: str
    task_id: UUID | None
    running: bool
    condition: str
    since: datetime | None
    state: str
    last_error: str | None = None
    last_error_since: datetime | None = None
    known_at: datetime | None = None
    known_age_seconds: float | None = None
    head: int | float | None = None
    head_age_seconds: float | None = None
    tip: int | float | None = None
    lag: int | float | None = None
    lag_seconds: float | None = None
    finalized: int | float | None = None
    reorgs: int | float | None = None
    deepest_reorg: int | float | None = None
    blocks_per_second: int | float | None = None
    eta_seconds: int | float | None = None
    endpoints: str | None = None
    endpoint_states: str | None = None
    endpoint_problems: str | None = None
    dissent: str | None = None


class ChainPage(Struct, frozen=True):
    """Every follower of an active DAG."""

    chains: list[ChainStatus]


class TaskQuery(Struct, frozen=True, forbid_unknown_fields=True):
    dag: ShortText | UnsetType = UNSET
    job: ShortText | UnsetType = UNSET
    status: TaskStatusName | UnsetType = UNSET
    limit: PageLimit = 100
    after: Sequence | UnsetType = UNSET


class WaitingFor(Struct, frozen=True):
    """Why a queued task doesn't run: ``reason`` for programs, ``message`` for people."""

    reason: Literal[
        "RetryTime",
        "JobRetired",
        "JobPaused",
        "Backpressure",
        "CapFull",
        "OperatorFull",
        "EarlierTask",
        "LaterTask",
        "Inputs",
        "Delivery",
        "Worker",
    ]
    message: str
    until: datetime | None = None
    since: datetime | None = None


class TaskSummary(Struct, frozen=True):
    """``start`` and ``end`` are the scope of a task that has one. ``progress`` was reported by its last attempt,
    which may have ended. ``waiting_for`` says why a queued task doesn't run yet."""

    task_id: UUID
    dag_name: str
    job: str
    operator: str
    runtime: str
    kind: str
    status: TaskStatusName
    attempt: int
    failures: int
    start: int | None
    end: int | None
    worker_id: str | None
    created_at: datetime
    ready_at: datetime
    lease_expires_at: datetime | None
    ended_at: datetime | None
    error_message: str | None
    progress: dict[str, Any] | None = None
    waiting_for: WaitingFor | None = None


class TaskPage(Struct, frozen=True):
    tasks: list[TaskSummary]
    next: str | None


class AttemptDetail(Struct, frozen=True):
    attempt: int
    worker_id: str
    epoch: int
    claimed_at: datetime
    ended_at: datetime | None
    outcome: str | None
    error_message: str | None
    progress: dict[str, Any] | None = None


class InputDetail(Struct, frozen=True):
    """An input as the last attempt read it; for a queued task, as the next attempt would read it now."""

    input_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    dataset: str | None
    storage: str
    revision: int
    trigger: bool
    after: int | None = None
    upto: int | None = None
    start: int | None = None
    end: int | None = None
    where: str | None = None


class OutputDetail(Struct, frozen=True):
    """One of the job's outputs, and the partitions that this task committed to it (newest first, at most 100)."""

    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    dataset: str | None
    storage: str
    partitions: list[CommittedPartition]


class CommittedPartition(Struct, frozen=True):
    partition_key: str
    start: int
    end: int
    current: bool
    revision: int
    row_count: int | None
    location: str | None
    committed_at: datetime


class EventDetail(Struct, frozen=True):
    event_id: int
    attempt: int | None
    dataset_version: UUID
    kind: str
    start: int
    end: int
    revision: int
    state: str
    created_at: datetime


class TaskDetail(TaskSummary, frozen=True, kw_only=True):
    """Attempts, events and partitions newest first, at most 100 of each. ``state`` was saved by an attempt for the
    next one."""

    waiting_for: WaitingFor | None
    attempts: list[AttemptDetail]
    inputs: list[InputDetail]
    outputs: list[OutputDetail]
    events: list[EventDetail]
    cause: Any = None
    state: Any = None


class TaskChanged(Struct, frozen=True):
    task_id: UUID
    status: TaskStatusName


class DatasetQuery(Struct, frozen=True, forbid_unknown_fields=True):
    dag: ShortText | UnsetType = UNSET
    job: ShortText | UnsetType = UNSET
    limit: PageLimit = 100
    after: UUID | UnsetType = UNSET


class DatasetSummary(Struct, frozen=True):
    """A dataset's current version. ``dataset`` is its published name, ``partitions`` counts the current ones. A
    buffered one has a ``schema_hash``, and its ``cursor`` is a position and not a block."""

    dataset: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    revision: int
    storage: str
    write_mode: str
    dag_name: str
    job: str | None
    output_index: int
    output_name: str
    cursor: int | None
    finalized: int | None
    created_at: datetime
    partitions: int
    schema_hash: str | None = None


class DatasetVersion(Struct, frozen=True):
    """A generation of a dataset; ``start`` and ``end`` are the first and the last block of its committed files."""

    dataset_version: UUID
    current: bool
    revision: int
    storage: str
    created_at: datetime
    partitions: int
    start: int | None
    end: int | None
    rows: int | None
    cursor: int | None
    updated_at: datetime | None


class DatasetLag(Struct, frozen=True):
    """How far a dataset is behind its inputs: ``behind`` in blocks (in rows, if the input is a buffered dataset),
    null if it isn't known. ``seconds`` have passed since its last commit."""

    behind: int | None
    seconds: float | None


class DatasetColumn(Struct, frozen=True):
    """``by``: whether the ``producer`` or the ``platform`` fills the column in."""

    name: str
    type: str
    by: Literal["producer", "platform"] = "producer"


class DatasetSchema(Struct, frozen=True):
    """The declared columns of a buffered dataset, and those that the platform adds."""

    columns: list[DatasetColumn]
    unique: list[str]


class DatasetDetail(DatasetSummary, frozen=True, kw_only=True):
    """``versions`` newest first, at most 100. ``hot_version`` holds the rows of a compacted dataset that are in
    Postgres. Only a buffered dataset declares a ``schema``; a query shows the columns of any other."""

    versions: list[DatasetVersion] = []
    lag: DatasetLag | None = None
    hot_version: UUID | None = None
    schema: DatasetSchema | None = None


class DatasetPage(Struct, frozen=True):
    datasets: list[DatasetSummary]
    next: str | None


class PartitionQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Only partitions that hold a block from ``start`` to ``end``, if these are given. ``details`` lists their
    files with sizes and hashes."""

    limit: PageLimit = 100
    after: Annotated[str, Meta(pattern=r"\A[0-9]{1,19}-[0-9]{1,19}\Z")] | UnsetType = UNSET
    start: Block | UnsetType = UNSET
    end: Block | UnsetType = UNSET
    details: bool = False


class PartitionFile(Struct, frozen=True):
    """A committed file as its manifest has it; null is what its writer didn't report."""

    location: str
    bytes: int
    rows: int | None = None
    content_hash: str | None = None
    min_block: int | None = None
    max_block: int | None = None


class PartitionSummary(CommittedPartition, frozen=True, kw_only=True):
    """``files`` are exactly the committed ones: readers must read these, and never list a folder. ``verified`` is
    the level at which its blocks were proven, ``edges`` the hashes that join it to its neighbours."""

    task_id: UUID | None
    attempt: int | None
    files: list[str]
    verified: str | None = None
    edges: ChainEdges | None = None
    details: list[PartitionFile] | None = None


class PartitionPage(Struct, frozen=True):
    """Current partitions of the current version, by block."""

    dataset_uuid: UUID
    dataset_version: UUID
    partitions: list[PartitionSummary]
    next: str | None


class JobPaused(Struct, frozen=True):
    dag_name: str
    job: str
    paused: bool


class OutboxQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: PageLimit = 100


class FailedDelivery(Struct, frozen=True):
    outbox_id: int
    kind: str
    runtime: str
    task_id: UUID | None
    tries: int
    last_error: str | None
    created_at: datetime
    failed_at: datetime


class FailedDeliveries(Struct, frozen=True):
    failed: list[FailedDelivery]


class ReplayRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Without ids, all failed deliveries are tried again."""

    # An empty list is refused: it could mean none, or all.
    outbox_ids: Annotated[list[Sequence], Meta(min_length=1, max_length=1000)] | None = None


class Replayed(Struct, frozen=True):
    replayed: int
