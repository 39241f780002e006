"""Functions of sources: they get the tick, the delivery or the request, and send their events themselves."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.support.functions import TestInvoker, open_test_invoker, python_bundle, zip_of
from tracelake.contracts.dispatcher_api import PayloadDelivery, PayloadRequest, PayloadSource
from tracelake.domain.bundles import BundleListing
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.parse import parse_dag
from tracelake.domain.runtimes import BUILT_IN
from tracelake.evm.devchain.accounts import accounts_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "webhook"
NOW = datetime(2026, 11, 18, tzinfo=UTC)
DELIVERY = PayloadSource("webhook", delivery=PayloadDelivery(3, "msg_3", NOW, 4, "text/plain", "ünd"))
BINARY = PayloadSource("webhook", delivery=PayloadDelivery(4, "msg_4", NOW, 2, None, None, "/wA="))
TICK = PayloadSource("cron", tick=1_795_034_400)
REQUEST = PayloadSource("manual", request=PayloadRequest(7, NOW, start=5, end=9))
PYTHON = """
from tracelake_function import Task
def handler(event, context):
    task = Task(event)
    print(event["source"]["kind"], sorted(event["source"]))
    if "delivery" in task.source:
        print(task.source_body().hex())
"""
NODE = """
import { Task } from "tracelake_function";
export const handler = async (event) => {
  const task = new Task(event);
  console.log(event.source.kind, Object.keys(task.source).sort());
  if (task.source.delivery) console.log((await task.sourceBody()).toString("hex"));
};
"""


@pytest.fixture
async def invoker(tmp_path: Path) -> AsyncIterator[TestInvoker]:
    async with open_test_invoker(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize(
    ("bundle", "entrypoint"),
    [(python_bundle(PYTHON), "main.handler"), (zip_of({"index.mjs": NODE}), "index.handler")],
    ids=["python", "node"],
)
async def test_a_function_gets_what_its_task_is_for_and_no_event_is_implied(
    invoker: TestInvoker, bundle: bytes, entrypoint: str
) -> None:
    for source, last in ((TICK, None), (REQUEST, None), (DELIVERY, "ünd".encode().hex()), (BINARY, "ff00")):
        ran = await invoker.run(bundle, entrypoint, source=source, inputs=[])
        assert (ran.status, ran.completion.events) == ("Completed", []), ran.error
        first, *more = ran.log.splitlines()
        assert first.startswith(source.kind)
        assert more == ([last] if last else [])


async def test_a_bootstrap_gets_it_too(invoker: TestInvoker) -> None:
    """A function in any language: the event is its payload."""
    source = (EXAMPLE.parent / "functions" / "bootstrap" / "bootstrap").read_bytes()
    ran = await invoker.run(zip_of({"bootstrap": source}), "x.y", source=TICK, inputs=[])
    assert (ran.status, ran.completion.events) == ("Completed", []), ran.error
    assert b'"tick":1795034400' in msgspec.json.encode(ran.task)


def test_the_example_is_a_valid_file() -> None:
    text = (EXAMPLE / "dag.yaml").read_text(encoding="utf-8")
    bundles = {}
    for name, digit in (("BACKFILL", "a"), ("NIGHTLY", "b")):
        reference = "sha256:" + digit * 64
        text = text.replace(f"bundle: {name}", f"bundle: {reference}")
        bundles[reference] = BundleListing(("main.py",), frozenset(), 1)
    dag = parse_dag(text, Installation(BUILT_IN, bundles=bundles))
    sources = {job.name: job.runs_code for job in dag.jobs if job.source is not None}
    assert sources == {"calls": True, "night": False}


def test_the_examples_query_finds_transfers_of_the_contract_that_its_call_names() -> None:
    """On the dev chain, whose tokens emit the transfers; and bytes are compared with bytes."""
    [named] = re.findall(r"0x[0-9a-f]{40}", (EXAMPLE / "README.md").read_text(encoding="utf-8"))
    assert named in accounts_of(0).coins
    tables = yaml.safe_load((EXAMPLE / "dag.yaml").read_text(encoding="utf-8"))["publish"]
    kept = [tables[name]["schema"]["columns"]["contract"] for name in ("called_contracts", "nightly_counts")]
    assert kept == ["bytea", "bytea"]


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (b'{"contract": "0x%040x", "from_block": 5, "to_block": 9}' % 7, None),
        (b'{"contract": "0x%040x", "from_block": 9, "to_block": 5}' % 7, "no range"),
        (b'{"contract": "0x%040x", "from_block": 0, "to_block": 10000000}' % 7, "no range"),
        (b'{"contract": "me", "from_block": 5, "to_block": 9}', "no address"),
        (b'{"contract": "0x%040x"}' % 7, "from_block and to_block missing"),
        (b"[]", "no JSON object"),
        (b'{"from_block": 5, "to_block": 9}', "^contract missing"),
        (b"\xff", "decode"),
    ],
)
def test_the_examples_function_takes_calls_that_it_can_use(body: bytes, refusal: str | None) -> None:
    found: dict[str, Any] = {}
    code = (EXAMPLE / "backfill" / "main.py").read_text(encoding="utf-8")
    exec(code.replace("from tracelake_function import Task", "Task = None"), found)
    if refusal is None:
        assert found["parse"](body, 1000) == {"contract": f"0x{7:040x}", "from_block": 5, "to_block": 9}
    else:
        with pytest.raises((ValueError, TypeError), match=refusal):
            found["parse"](body, 1000)
