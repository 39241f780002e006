"""Each process that has no API for people is monitored on a port of its own, from its first moment: also while it
waits for the rest of the stack. The port answers that and nothing else, and shows no secret of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

PATIENCE = 120.0
SECRET = "not-for-anybodys-eyes-0123456789abcdef"
NOWHERE = "127.0.0.1:9"
COMMANDS = {
    "worker": ("worker", "--runtime", "ecs_python", "--drain-seconds", "0"),
    "invoker": ("worker", "--runtime", "lambda", "--drain-seconds", "0"),
    "sink": ("sink", "--drain-seconds", "0"),
    "delivery": ("delivery", "--drain-seconds", "0"),
    "scheduler": ("scheduler",),
}
OWN = {
    "worker": "tracelake_attempt_slots",
    "invoker": "tracelake_attempt_slots",
    "sink": "tracelake_process_info",
    "delivery": "tracelake_process_info",
    "scheduler": "tracelake_scheduler_acting",
}
DSN = f"postgresql://someone:{SECRET}@{NOWHERE}/nothing"


@contextmanager
def started(command: tuple[str, ...], folder: Path) -> Iterator[str]:
    """The process, far from any stack; gives the address of its metrics, from its log."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRACELAKE_")},
        "TRACELAKE_INTERNAL_URL": f"http://{NOWHERE}",
        "TRACELAKE_WORKER_TOKEN": SECRET,
        "TRACELAKE_QUEUE_DSN": DSN,
        "TRACELAKE_DATA_WRITE_DSN": DSN,
        "TRACELAKE_DATA_READ_DSN": DSN,
    }
    output = folder / "output"
    arguments = [sys.executable, "-P", "-m", "tracelake", *command, "--home", str(folder / "home")]
    with output.open("wb") as file:
        process = subprocess.Popen(arguments, env=environment, cwd=folder, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(r'"url": ?"(http://[^"]+)/metrics"', output.read_text())):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        # In order: an invoker that is killed while it tries its sandbox leaves the try behind.
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_port_answers_its_monitoring_and_nothing_else(name: str, tmp_path: Path) -> None:
    with (
        started(COMMANDS[name], tmp_path) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client,
    ):
        assert urlsplit(url).hostname == "127.0.0.1"
        page = client.get("/metrics")
        assert page.status_code == 200
        families = {family.name for family in text_string_to_metric_families(page.text)}
        assert {"tracelake_process_info", "process_cpu_seconds", OWN[name]} <= families
        assert client.get("/healthz").json() == {"status": "ok"}
        for text in (page.text, str(page.headers)):
            assert SECRET not in text
            assert "postgresql:" not in text
        for path in (
            "/",
            "/v1/tasks",
            "/internal/task-claim",
            "/readyz",
            "/2015-03-31/functions/x/invocations",
        ):
            for method in ("GET", "POST"):
                answer = client.request(method, path, headers={"X-Trace-Worker-Token": SECRET})
                assert answer.status_code == 404, f"{method} {path}"
