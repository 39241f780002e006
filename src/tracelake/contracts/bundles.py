"""The wire models of bundles and invokers: people push functions, invokers run them, the Dispatcher invokes them.

An invoker registers its address every few seconds (``POST /internal/invoker``) and is forgotten when it stops. The
Dispatcher leases a task and sends it in one call to one of them::

    POST {url}/2015-03-31/functions/{function}/invocations
    X-Trace-Worker-Token: ...
    X-Amz-Invocation-Type: Event
    Expect: 100-continue

with an ``Invocation`` as its body, sent when the invoker asks for it: until then nothing was delivered.
``function`` is the hash of the bundle in hex, or ``noop``. Answers: 202, the invoker has accepted the attempt, and
no other ever receives it; 429, no free slot now; 503 or another refusal, it wasn't accepted. An attempt is
delivered at most once, so after any other end of the call (a broken connection, no answer in time) the Dispatcher
gives the attempt up, and the invoker may still be running it.

The bundle itself is fetched from ``GET /internal/bundle?sha256=`` and must be verified before it is run.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from tracelake.contracts.dispatcher_api import TaskPayload
from tracelake.contracts.user_api import PageLimit
from tracelake.domain.operators.in_process import NOOP_SPEC

INVOKE_PATH = "/2015-03-31/functions/{function}/invocations"
INVOKER_PATH = "/internal/invoker"
BUNDLE_CONTENT_PATH = "/internal/bundle"
NOOP_FUNCTION = NOOP_SPEC.name
#: Interval of an invoker's registrations.
REGISTER_SECONDS = 5.0
#: An invoker that hasn't registered for this time is no longer used.
FORGET_SECONDS = 20.0

BundleHash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", description="SHA-256 of the zip file, in hex.")]


class BundleSummary(Struct, frozen=True):
    """``bundle`` is the value of ``udf.bundle`` in a DAG; ``bytes`` is the size of the zip file."""

    bundle: str
    bytes: int
    unpacked_bytes: int
    files: int
    has_bootstrap: bool
    pushed_by: str
    created_at: datetime


class BundleDetail(BundleSummary, frozen=True, kw_only=True):
    names: list[str]


class BundleQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: PageLimit = 100
    after: Annotated[int, Meta(ge=1, le=2**63 - 1)] | UnsetType = UNSET


class BundlePage(Struct, frozen=True):
    """Newest first."""

    bundles: list[BundleSummary]
    next: str | None


class BundleContentQuery(Struct, frozen=True, forbid_unknown_fields=True):
    sha256: BundleHash


class InvokerRegistration(Struct, frozen=True, forbid_unknown_fields=True):
    """An invoker's address without a path (or its private socket, ``unix:///path``, on the Dispatcher's own
    machine), and the number of functions that it runs at a time: 0 when it is shutting down."""

    url: Annotated[
        str, Meta(pattern=r"\A(https?://[A-Za-z0-9.:_\[\]-]{1,200}|unix:///[A-Za-z0-9._~%/-]{1,1000})\Z")
    ]
    concurrency: Annotated[int, Meta(ge=0, le=100_000)]


class InvokerRegistered(Struct, frozen=True):
    """Register again within ``again_in_seconds``."""

    url: str
    again_in_seconds: float


class Invocation(TaskPayload, frozen=True, kw_only=True):
    """The body of an invocation: the claim's payload and its lease. ``udf`` is ``{bundle, entrypoint}``."""

    lease_token: UUID
    lease_expires_at: datetime
    capability_token: str

    @classmethod
    def of(
        cls, task: TaskPayload, lease_token: UUID, lease_expires_at: datetime, capability_token: str
    ) -> Invocation:
        fields: dict[str, Any] = structs.asdict(task)
        return cls(
            **fields,
            lease_token=lease_token,
            lease_expires_at=lease_expires_at,
            capability_token=capability_token,
        )

    def __repr__(self) -> str:
        return f"Invocation({self.task_id}, attempt {self.attempt}, …)"


def function_of(task: TaskPayload) -> str:
    """The function of a task's payload, as the invoke path names it."""
    if task.udf is None:
        return NOOP_FUNCTION
    return str(task.udf["bundle"]).removeprefix("sha256:")
