"""A small receiver of the demo's alerts: it checks signatures, and knows which alerts stand."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tracelake.domain.standard_webhooks import (
    WEBHOOK_ID,
    WEBHOOK_SIGNATURE,
    WEBHOOK_TIMESTAMP,
    SignatureVerdict,
    encode_secret,
    verify,
)


class AlertReceiver:
    """``standing`` has the alerts that were sent and not retracted, by the id of their records."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self.standing: dict[str, str] = {}
        self.retracted = 0
        self.refused = 0
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """Of the stack: the secrets that the DAG names, and that this host may be reached."""
        return {
            "TRACELAKE_SECRET_ALERT_HOOK": self.url,
            "TRACELAKE_SECRET_ALERT_KEY": encode_secret(self._key),
            "TRACELAKE_DELIVERY_ALLOW": self.url.removeprefix("http://").partition("/")[0],
        }

    def take(self, headers: dict[str, str], body: bytes) -> int:
        verdict = verify(
            [self._key],
            message_id=headers.get(WEBHOOK_ID, ""),
            timestamp=headers.get(WEBHOOK_TIMESTAMP, ""),
            signature=headers.get(WEBHOOK_SIGNATURE, ""),
            body=body,
            now=time.time(),
        )
        with self._lock:
            if verdict is not SignatureVerdict.VALID:
                self.refused += 1
                return 401
            # At least once means that a message may come twice, under one id.
            if headers[WEBHOOK_ID] not in self._seen:
                self._seen.add(headers[WEBHOOK_ID])
                message = json.loads(body)
                if message["type"] == "retracted":
                    self.standing.pop(message["id"], None)
                    self.retracted += 1
                else:
                    self.standing[message["id"]] = message["data"]["dedupe_key"]
        return 204

    def alerts(self) -> set[str]:
        with self._lock:
            return set(self.standing.values())


@contextmanager
def receiving() -> Iterator[AlertReceiver]:
    receiver = AlertReceiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(receiver.take(headers, body))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """The demo prints its own lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/alerts"
    thread = threading.Thread(target=server.serve_forever, name="receiver", daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
