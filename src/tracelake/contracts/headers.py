"""Names of the platform's own HTTP headers, and of those of AWS Lambda that it uses.

Servers, clients and the gateways between them import the names from here. Only the libraries that are copied into
functions spell them out again (``functions/``): they import nothing of the platform.
"""

from __future__ import annotations

OWN_PREFIX = "X-Trace-"
"""Every header of the platform's own begins with it."""
WORKER_HEADER = "X-Trace-Worker-Token"
CAPABILITY_HEADER = "X-Trace-Task-Capability"
AUTHORIZATION_HEADER = "Authorization"
"""With a user's token, as ``bearer`` writes it."""

QUERY_ID_HEADER = "X-Trace-Query-Id"
ROW_COUNT_HEADER = "X-Trace-Row-Count"
TRUNCATED_HEADER = "X-Trace-Truncated"
"""``true`` or ``false``."""

INVOCATION_TYPE_HEADER = "X-Amz-Invocation-Type"
INVOCATION_TYPE_EVENT = "Event"
"""The only type of invocation that is sent and served."""
RUNTIME_REQUEST_ID_HEADER = "Lambda-Runtime-Aws-Request-Id"
RUNTIME_DEADLINE_HEADER = "Lambda-Runtime-Deadline-Ms"
RUNTIME_ARN_HEADER = "Lambda-Runtime-Invoked-Function-Arn"
RUNTIME_TRACE_HEADER = "Lambda-Runtime-Trace-Id"


def bearer(token: str) -> str:
    """The value of ``Authorization`` for a user's token."""
    return f"Bearer {token}"
