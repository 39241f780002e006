"""The operator process protocol, version 1: how a worker's wrapper and an operator process talk.

They share one Unix stream socket that nobody else can open. A frame is four bytes of length (big-endian) and
that many bytes of JSON, at most ``MAX_FRAME``. A frame that is too long, no JSON or no message of this module
ends the conversation: the attempt has failed, and the process is killed.

    wrapper                                operator process
       ◀──────────────── Ready ────────────────   imports done, session open
       ── Run (+ the log's descriptor) ──▶        one attempt at a time
       ◀──────────────── Progress ─────────────   any number, not answered
       ◀──────────────── Call ─────────────────
       ── Reply ────────────────────────▶
       ── Cancel | Pause | Token ───────▶         at any time
       ◀──────────────── Finished ─────────────   then the next Run, or the end
       ◀──────────────── Ready ────────────────   only after a Finished that is ``tidying``

The wrapper alone holds the worker token, the queue's and the data database's credentials; the operator asks and
the wrapper acts, adding the attempt's fence to everything it passes on. So what an operator says after its
attempt has been superseded changes nothing, however long it goes on. ``Run`` carries the attempt's own
environment (its capability token, its declared secrets) and nothing else of the worker's.

``Run`` travels with one descriptor (SCM_RIGHTS): where the attempt's standard output and error go.
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
MAX_RUNS = 500
"""A process isn't reusable after so many attempts, as clean as it may be: memory grows in small steps."""

Version = Annotated[int, Meta(ge=1, le=1000)]


class SparkTarget(Struct, frozen=True, kw_only=True):
    """Where the attempt's Spark is: a Connect endpoint and the token that opens it."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"SparkTarget({self.url}, …)"


class Run(Struct, frozen=True, kw_only=True, tag="run"):
    """``rpc_pool`` is the one that the job's config names, if the worker has it; ``rpc_pools`` are the names of
    all that it has. ``data_dsn`` opens the data database by a login of the attempt's own, for loading its staging
    tables and reading its hot inputs; null for an attempt that has neither."""

    version: Version
    task: TaskPayload
    environment: dict[str, str]
    spark: SparkTarget | None = None
    data_dsn: str | None = None
    state: Any = None
    rpc_pool: PoolConfig | None = None
    rpc_pools: list[str] = []

    def __repr__(self) -> str:
        return f"Run({self.task.task_id}, attempt {self.task.attempt}, …)"


class Problem(Struct, frozen=True):
    """Why a call was refused, as the platform's own error tree has it."""

    status: int
    reason: str
    message: str


class Reply(Struct, frozen=True, kw_only=True, tag="reply"):
    call_id: int
    value: Any = None
    problem: Problem | None = None


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop soon: the process is killed a moment later."""

    reason: str


class Pause(Struct, frozen=True, tag="pause"):
    """A source stops producing until it is told otherwise."""

    paused: bool


class Token(Struct, frozen=True, tag="token"):
    """A fresh capability token, before the old one ends."""

    capability_token: str

    def __repr__(self) -> str:
        return "Token(…)"


ToOperator = Run | Reply | Cancel | Pause | Token


class Ready(Struct, frozen=True, tag="ready"):
    version: Version
    operators: list[str]


class Progress(Struct, frozen=True, tag="progress"):
    """``fields`` is small and flat: it ends up on the task's row for people to read."""

    fields: dict[str, Any]


class EmitEvents(Struct, frozen=True, tag="emit"):
    """Answered once the Dispatcher has accepted all of them."""

    events: list[EventIn]


class PublishRecords(Struct, frozen=True, kw_only=True, tag="publish"):
    """Records for a buffered dataset, answered with how many were accepted. With a ``schema_hash`` they are refused
    unless the dataset's schema is that one."""

    dataset: str
    records: list[dict[str, Any]]
    schema_hash: str | None = None


class Query(Struct, frozen=True, tag="query"):
    """One SELECT over the task's inputs, answered with a ``QueryResponse``."""

    request: QueryRequest


class SaveState(Struct, frozen=True, tag="save_state"):
    """What the next attempt of this task finds in ``Run.state``."""

    state: Any


class ListFiles(Struct, frozen=True, tag="list_files"):
    """The committed files of an input within its scope."""

    input_index: int


class StagedTable(Struct, frozen=True):
    """A staging table of this attempt and how many rows were loaded into it. A commit that finds another number
    is refused: a database that crashed has emptied it, or somebody goes on loading."""

    name: str
    rows: int


class StagedRows(Struct, frozen=True, kw_only=True):
    """What is to become an output's rows: exactly these tables. They are dropped by the commit, or only emptied
    when they are ``kept`` for the next one."""

    output_index: int
    tables: list[StagedTable]
    layout: TableLayout = PLAIN
    kept: bool = False


class CommitRows(Struct, frozen=True, kw_only=True, tag="commit_rows"):
    """Make staged rows of Postgres outputs visible, and say what follows from it, in one transaction.

    ``outputs`` are committed over ``start``–``end``, those without ``staged`` rows as empty; ``events`` are sent
    after it and before the answer.
    """

    outputs: list[int]
    start: int
    end: int
    events: list[EventIn] = []
    staged: list[StagedRows] = []


Action = EmitEvents | PublishRecords | Query | SaveState | ListFiles | CommitRows


class Call(Struct, frozen=True, tag="call"):
    call_id: int
    action: Action


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    """How the attempt went. ``reusable`` is false when the process isn't as it was before: children or threads
    of the operator are still there, or it held secrets. A reusable process takes the next attempt at once, unless
    it is ``tidying``: then it says ``Ready`` when it is done with that."""

    status: Literal["Completed", "Failed", "Canceled"]
    outputs: list[OutputIn] = []
    events: list[EventIn] = []
    error_message: str | None = None
    retryable: bool = True
    reusable: bool = True
    tidying: bool = False


FromOperator = Ready | Progress | Call | Finished
