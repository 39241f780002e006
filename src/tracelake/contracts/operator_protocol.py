"""The operator process protocol, version 1: the messages between a worker's wrapper and an operator process.

They share one private Unix stream socket. A frame is four bytes of length (big-endian) and that many bytes of JSON,
at most ``MAX_FRAME``. A frame that is too long, isn't JSON or isn't a message of this module ends the connection:
the attempt has failed, and the process is killed.

    wrapper                                operator process
       ◀──────────────── Ready ────────────────   imports done, session open
       ── Run (+ the log's descriptor) ──▶        one attempt at a time
       ◀──────────────── Progress ─────────────   any number, without a reply
       ◀──────────────── Call ─────────────────
       ── Reply ────────────────────────▶
       ── Cancel | Pause | Token ───────▶         at any time
       ◀──────────────── Finished ─────────────   then the next Run, or the end
       ◀──────────────── Ready ────────────────   only after a Finished that is ``tidying``

The wrapper alone holds the worker token, the queue's and the data database's credentials; the operator asks and the
wrapper acts, adding the attempt's fence to every request. So calls of an operator whose attempt has been superseded
change nothing, however long it goes on. ``Run`` carries the attempt's own environment (its capability token, its
declared secrets) and nothing else of the worker's.

``Run`` is sent with one descriptor (SCM_RIGHTS), which receives the attempt's standard output and error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tracelake.contracts.dispatcher_api import EventIn, OutputIn, TaskPayload
from tracelake.contracts.query_api import QueryRequest
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.table_layout import PLAIN, TableLayout

VERSION = 1
MAX_FRAME = 16 * 1024 * 1024
#: Maximum number of attempts of one process: memory grows in small steps even in a clean process.
MAX_RUNS = 500

ProtocolVersion = Annotated[int, Meta(ge=1, le=1000)]


class SparkTarget(Struct, frozen=True, kw_only=True):
    """The Spark of an attempt: a Connect endpoint and its token."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"SparkTarget({self.url}, …)"


class Run(Struct, frozen=True, kw_only=True, tag="run"):
    """``rpc_pool`` is the one that the job's config names, if the worker has it; ``rpc_pools`` are the names of all
    the worker's pools. ``data_ticket_dsn`` opens the data database with the attempt's own login, for loading its
    staging tables and reading its hot inputs; null for an attempt that has neither."""

    version: ProtocolVersion
    task: TaskPayload
    environment: dict[str, str]
    spark: SparkTarget | None = None
    data_ticket_dsn: str | None = None
    state: Any = None
    rpc_pool: PoolConfig | None = None
    rpc_pools: list[str] = []

    def __repr__(self) -> str:
        return f"Run({self.task.task_id}, attempt {self.task.attempt}, …)"


class CallProblem(Struct, frozen=True):
    """Why a call was refused, by the platform's error tree."""

    status: int
    reason: str
    message: str


class Reply(Struct, frozen=True, kw_only=True, tag="reply"):
    call_id: int
    value: Any = None
    problem: CallProblem | None = None


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop soon: the process is killed a moment later."""

    reason: str


class Pause(Struct, frozen=True, tag="pause"):
    """A source stops producing until ``paused`` is false again."""

    paused: bool


class Token(Struct, frozen=True, tag="token"):
    """A new capability token, sent before the old one expires."""

    capability_token: str

    def __repr__(self) -> str:
        return "Token(…)"


ToOperator = Run | Reply | Cancel | Pause | Token


class Ready(Struct, frozen=True, tag="ready"):
    version: ProtocolVersion
    operators: list[str]


class Progress(Struct, frozen=True, tag="progress"):
    """``fields`` is small and flat: people read it on the task's page."""

    fields: dict[str, Any]


class EmitEvents(Struct, frozen=True, tag="emit"):
    """Answered once the Dispatcher has accepted all events."""

    events: list[EventIn]


class PublishRecords(Struct, frozen=True, kw_only=True, tag="publish"):
    """Records for a buffered dataset, answered with the number of accepted ones. With a ``schema_hash`` they are
    refused unless the dataset has that schema."""

    dataset: str
    records: list[dict[str, Any]]
    schema_hash: str | None = None


class Query(Struct, frozen=True, tag="query"):
    """One SELECT over the task's inputs, answered with a ``QueryResponse``."""

    request: QueryRequest


class SaveState(Struct, frozen=True, tag="save_state"):
    """The next attempt of this task gets it as ``Run.state``."""

    state: Any


class ListFiles(Struct, frozen=True, tag="list_files"):
    """The committed files of an input within its scope, or up to ``margin`` blocks beyond it."""

    input_index: int
    margin: int = 0


class ReadSourceBody(Struct, frozen=True, tag="source_body"):
    """The body of the delivery that the task is for, answered as base64."""


class StagedTable(Struct, frozen=True):
    """A staging table of this attempt and the number of rows loaded into it. A commit that finds another number is
    refused: the database crashed and emptied the table, or a load is still running."""

    name: str
    rows: int


class StagedRows(Struct, frozen=True, kw_only=True):
    """The staging tables that become an output's rows. The commit drops them, or only empties them when they are
    ``kept`` for the next one."""

    output_index: int
    tables: list[StagedTable]
    layout: TableLayout = PLAIN
    kept: bool = False


class CommitRows(Struct, frozen=True, kw_only=True, tag="commit_rows"):
    """Make staged rows of Postgres outputs visible and record the events about them, in one transaction.

    ``outputs`` are committed over ``start``–``end``, those without ``staged`` rows as empty; ``events`` are sent
    after the commit and before the reply.
    """

    outputs: list[int]
    start: int
    end: int
    events: list[EventIn] = []
    staged: list[StagedRows] = []


Action = EmitEvents | PublishRecords | Query | SaveState | ListFiles | ReadSourceBody | CommitRows


class Call(Struct, frozen=True, tag="call"):
    call_id: int
    action: Action


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    """The attempt's outcome. ``reusable`` is false when the process isn't clean: children or threads of the
    operator are left, or it held secrets. A reusable process takes the next attempt at once, unless it is
    ``tidying``: then it sends ``Ready`` afterwards."""

    status: Literal["Completed", "Failed", "Canceled"]
    outputs: list[OutputIn] = []
    events: list[EventIn] = []
    error_message: str | None = None
    retryable: bool = True
    reusable: bool = True
    tidying: bool = False


FromOperator = Ready | Progress | Call | Finished
