"""Functions in real sandboxes: the three kinds, their ends, their logs, and which environments are used again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.functions import (
    TestInvoker,
    invocation,
    link_in_zip,
    open_test_invoker,
    python_bundle,
    sha256_of,
    zip_of,
)
from tracelake.contracts.dispatcher_api import FetchResponse
from tracelake.domain.errors import Forbidden, OverQuota
from tracelake.worker.lambda_ import function_program

WHO = """
import os
count = 0
def handler(event, context):
    global count
    count += 1
    print("run", count, "of", event["task_id"])
"""


@pytest.fixture
async def invoker(tmp_path: Path) -> AsyncIterator[TestInvoker]:
    async with open_test_invoker(tmp_path) as opened:
        yield opened


def environments(tmp_path: Path) -> int:
    return len(list((tmp_path / "environments").iterdir()))


async def none_is_left(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        while environments(tmp_path):
            await asyncio.sleep(0.02)


async def test_a_python_function_that_returns_nothing_completes_its_task_with_its_scope(
    invoker: TestInvoker,
) -> None:
    ran = await invoker.run(python_bundle("def handler(event, context):\n    print('hello')\n"))
    assert ran.status == "Completed", ran.error
    assert ran.log == "hello\n"
    [event] = ran.completion.events
    assert (event.start, event.end) == (0, 9)
    assert event.dataset_uuid == ran.task.outputs[0].dataset_uuid


async def test_a_noop_needs_no_bundle(invoker: TestInvoker) -> None:
    ran = await invoker.run(None)
    assert (ran.status, len(ran.completion.events)) == ("Completed", 1)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("index.mjs", "export const handler = async (event) => { console.log('esm', event.attempt) }"),
        ("index.cjs", "exports.handler = (event) => { console.log('cjs', event.attempt) }"),
        (
            "index.js",
            "exports.handler = (event, context, done) => { console.log('cb', event.attempt); done() }",
        ),
    ],
)
async def test_node_functions_of_every_kind_run(invoker: TestInvoker, name: str, source: str) -> None:
    ran = await invoker.run(zip_of({name: source}), "index.handler")
    assert ran.status == "Completed", ran.error
    assert ran.log.split() == [{"index.mjs": "esm", "index.cjs": "cjs", "index.js": "cb"}[name], "1"]


async def test_a_node_function_finds_its_context_and_the_client(invoker: TestInvoker) -> None:
    source = """
    import { Task, TaskError } from "tracelake_function";
    export async function handler(event, context) {
      const task = new Task(event);
      console.log(context.functionName, context.getRemainingTimeInMillis() > 0, task.start, task.end);
      await task.query("select 1").catch((error) => console.log(error instanceof TaskError, error.reason));
    }"""
    ran = await invoker.run(zip_of({"index.mjs": source}), "index.handler")
    assert ran.log == "dag_job true 0 9\ntrue NotServed\n", ran.error


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("exports.handler = async () => { throw new TypeError('no') }", "TypeError: no"),
        (
            "exports.handler = () => new Promise(() => setTimeout(() => { throw new Error('late') }))",
            "Error: late",
        ),
        ("throw new RangeError('at once')", "could not be started: RangeError: at once"),
        ("exports.other = 1", "could not be started: Runtime.HandlerNotFound"),
    ],
)
async def test_what_a_node_function_throws_fails_the_attempt(
    invoker: TestInvoker, source: str, error: str
) -> None:
    ran = await invoker.run(zip_of({"index.js": source}), "index.handler")
    assert (ran.status, ran.completion.retryable) == ("Failed", True)
    assert error in ran.error


async def test_an_executable_bootstrap_runs_by_itself(invoker: TestInvoker) -> None:
    example = Path(__file__).parents[3] / "examples/functions/bootstrap/bootstrap"
    bundle = zip_of({"bootstrap": example.read_bytes()})
    first, second = await invoker.run(bundle, "x.y"), await invoker.run(bundle, "x.y")
    assert (first.status, second.status) == ("Completed", "Completed"), first.error
    assert first.log.startswith("an event of ")
    assert len(second.log.splitlines()) == 1


async def test_the_environment_is_lambdas_and_nothing_else(invoker: TestInvoker) -> None:
    source = """
import os
def handler(event, context):
    for name in sorted(os.environ):
        print(name)
    assert os.environ["_HANDLER"] == "main.handler"
    assert os.environ["AWS_LAMBDA_FUNCTION_NAME"] == context.function_name == "dag_job"
    assert os.environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] == "256"
    assert 0 < context.get_remaining_time_in_millis() <= 30_000
    assert context.invoked_function_arn.endswith(":function:dag_job")
"""
    ran = await invoker.run(python_bundle(source))
    assert ran.status == "Completed", ran.error
    ours = ("AWS_", "LAMBDA_", "TRACE_DISPATCHER_URL", "_HANDLER", "_X_AMZN", "PYTHON", "LD_LIBRARY_PATH")
    usual = {"HOME", "LANG", "PATH", "PWD", "TMPDIR", "TZ"}
    assert [name for name in ran.log.split() if not name.startswith(ours) and name not in usual] == []


async def test_an_exception_fails_the_attempt_with_its_type_and_message(invoker: TestInvoker) -> None:
    ran = await invoker.run(python_bundle("def handler(event, context):\n    raise KeyError('chunk')\n"))
    assert (ran.status, ran.completion.retryable) == ("Failed", True)
    assert ran.error == "KeyError: 'chunk'"
    assert "Traceback" in ran.log
    assert ran.log.endswith("[tracelake] KeyError: 'chunk'\n")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import nothing_of_that_name", "Runtime.ImportModuleError"),
        ("def handler(", "Runtime.UserCodeSyntaxError"),
        ("1/0", "ZeroDivisionError"),
        ("import os\nos._exit(3)", "ended by itself (exit code 3)"),
    ],
)
async def test_a_function_that_can_not_be_loaded_fails_the_attempt(
    invoker: TestInvoker, source: str, error: str
) -> None:
    ran = await invoker.run(python_bundle(source))
    assert (ran.status, ran.completion.retryable) == ("Failed", True)
    assert error in ran.error


async def test_an_entrypoint_that_is_not_there_fails_for_good(invoker: TestInvoker) -> None:
    ran = await invoker.run(python_bundle("x = 1"), "other.handler")
    assert (ran.status, ran.completion.retryable) == ("Failed", False)
    assert "other.py" in ran.error


async def test_a_function_that_takes_too_long_is_killed_and_says_so(
    invoker: TestInvoker, tmp_path: Path
) -> None:
    source = "import time\ndef handler(event, context):\n    print('begin')\n    time.sleep(600)\n"
    ran = await invoker.run(python_bundle(source), timeout_seconds=1)
    assert (ran.status, ran.error) == ("Failed", "timed out after 1 s")
    assert ran.log == "begin\n[tracelake] timed out after 1 s\n"
    await none_is_left(tmp_path)


async def test_an_environment_is_used_again_and_each_log_holds_its_own_lines(invoker: TestInvoker) -> None:
    bundle = python_bundle(WHO)
    runs = [await invoker.run(bundle) for _ in range(3)]
    assert [ran.log for ran in runs] == [f"run {n} of {ran.task.task_id}\n" for n, ran in enumerate(runs, 1)]


async def test_another_job_or_entrypoint_or_bundle_gets_an_environment_of_its_own(
    invoker: TestInvoker, tmp_path: Path
) -> None:
    bundle = python_bundle(WHO + "\nother = handler\n")
    await invoker.run(bundle)
    for ran in (
        await invoker.run(bundle, "main.other"),
        await invoker.run(python_bundle(WHO + "# changed")),
        await invoker.run(bundle, timeout_seconds=29),
    ):
        assert ran.log.startswith("run 1 of")
    async with asyncio.timeout(30):
        while environments(tmp_path) > 2:
            await asyncio.sleep(0.02)


async def test_an_environment_that_failed_is_never_used_again(invoker: TestInvoker) -> None:
    source = WHO + "    if event['config'].get('exit'):\n        os._exit(1)\n"
    bundle = python_bundle(source)
    assert (await invoker.run(bundle)).log.startswith("run 1 of")
    assert (await invoker.run(bundle, config={"exit": True})).status == "Failed"
    assert (await invoker.run(bundle)).log.startswith("run 1 of")


async def test_an_environment_with_a_process_left_behind_is_never_used_again(invoker: TestInvoker) -> None:
    source = WHO + "    import subprocess\n    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    bundle = python_bundle(source)
    for _ in range(2):
        ran = await invoker.run(bundle)
        assert ran.status == "Completed"
        assert ran.log.startswith("run 1 of")


async def test_idle_environments_end_after_a_while(tmp_path: Path) -> None:
    async with open_test_invoker(tmp_path, idle_seconds=0.2) as invoker:
        await invoker.run(python_bundle(WHO))
        await none_is_left(tmp_path)
        assert (await invoker.run(python_bundle(WHO))).log.startswith("run 1 of")


async def test_a_zip_that_was_changed_in_the_cache_is_fetched_again(
    invoker: TestInvoker, tmp_path: Path
) -> None:
    bundle = python_bundle(WHO)
    await invoker.run(bundle)
    cached = tmp_path / "bundles" / f"{sha256_of(bundle)}.zip"
    cached.write_bytes(python_bundle("def handler(event, context):\n    print('evil')\n"))
    ran = await invoker.run(bundle)
    assert ran.log.startswith("run 1 of")
    assert cached.read_bytes() == bundle


async def test_a_bundle_that_does_not_match_its_hash_never_runs(invoker: TestInvoker) -> None:
    task = invocation(python_bundle(WHO))
    invoker.bundles[sha256_of(python_bundle(WHO))] = python_bundle("print('evil')")
    invoker.take(task)
    end = await invoker.dispatcher.end_of(task.task_id)
    assert (end.status, end.retryable) == ("Failed", False)
    assert "doesn't match" in (end.error_message or "")
    assert "evil" not in invoker.log_of(task)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(zip_of({"../main.py": "x = 1"}), id="dots"),
        pytest.param(zip_of({"main.py": "x = 1", "zeros": b"\0" * 2**26}), id="bomb"),
        pytest.param(link_in_zip("main.py", "/etc/passwd"), id="link"),
        pytest.param(b"no zip at all", id="no zip"),
    ],
)
async def test_a_hostile_zip_fails_for_good_with_the_reason(invoker: TestInvoker, hostile: bytes) -> None:
    ran = await invoker.run(hostile)
    assert (ran.status, ran.completion.retryable) == ("Failed", False)
    assert ran.error.startswith("not a bundle: ")
    assert (await invoker.run(None)).status == "Completed"


async def test_node_comes_from_a_package_when_the_machine_has_none(
    invoker: TestInvoker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    function_program.find_node.cache_clear()
    try:
        source = "exports.handler = () => console.log(process.execPath)"
        ran = await invoker.run(zip_of({"index.js": source}), "index.handler")
    finally:
        function_program.find_node.cache_clear()
    assert (ran.status, ran.log) == ("Completed", "/opt/node/node\n"), ran.error


async def test_a_bundle_that_nobody_has_fails_for_good(invoker: TestInvoker) -> None:
    task = invocation(b"never pushed")
    invoker.take(task)
    end = await invoker.dispatcher.end_of(task.task_id)
    assert (end.status, end.retryable) == ("Failed", False)


async def test_the_same_attempt_is_never_started_twice(invoker: TestInvoker) -> None:
    ran = await invoker.run(python_bundle(WHO))
    invoker.take(ran.task)
    again = await invoker.run(python_bundle(WHO))
    assert again.log.startswith("run 2 of")
    assert len(invoker.dispatcher.completions[ran.task.task_id]) == 1


async def test_more_than_there_are_slots_is_refused(invoker: TestInvoker) -> None:
    bundle = python_bundle("import time\ndef handler(event, context):\n    time.sleep(600)\n")
    invoker.bundles[sha256_of(bundle)] = bundle
    for _ in range(2):
        invoker.take(invocation(bundle))
    with pytest.raises(OverQuota) as refused:
        invoker.take(invocation(bundle))
    assert refused.value.reason == "NoSlot"


async def test_a_canceled_task_ends_its_function(tmp_path: Path) -> None:
    async with open_test_invoker(tmp_path, look_seconds=0.05) as invoker:
        bundle = python_bundle("import time\ndef handler(event, context):\n    time.sleep(600)\n")
        invoker.bundles[sha256_of(bundle)] = bundle
        task = invocation(bundle)
        invoker.take(task)
        invoker.dispatcher.fetched[task.task_id] = FetchResponse("Canceled", task.task_id, 1, task)
        async with asyncio.timeout(30):
            while invoker.invoker.running:
                await asyncio.sleep(0.02)
        assert task.task_id not in invoker.dispatcher.completions
        assert "the task was canceled" in invoker.log_of(task)
        await none_is_left(tmp_path)


async def test_a_refused_result_fails_the_attempt_for_good(invoker: TestInvoker) -> None:
    bundle = python_bundle("def handler(event, context):\n    return {'events': [{'cursor': 3}]}\n")
    invoker.bundles[sha256_of(bundle)] = bundle
    task = invocation(bundle)
    invoker.dispatcher.refuse[task.task_id] = Forbidden("NotYourDataset", "not yours")
    invoker.take(task)
    end = await invoker.dispatcher.end_of(task.task_id, 2)
    assert (end.status, end.retryable) == ("Failed", False)
    assert "NotYourDataset" in (end.error_message or "")


async def test_what_is_running_when_the_invoker_stops_is_handed_back(tmp_path: Path) -> None:
    async with open_test_invoker(tmp_path) as invoker:
        bundle = python_bundle("import time\ndef handler(event, context):\n    time.sleep(600)\n")
        invoker.bundles[sha256_of(bundle)] = bundle
        task = invocation(bundle)
        invoker.take(task)
        await invoker.invoker.stop(0.1)
        assert (await invoker.dispatcher.end_of(task.task_id)).status == "Released"
        await none_is_left(tmp_path)


async def test_a_function_that_uses_too_much_memory_is_ended_and_says_so(invoker: TestInvoker) -> None:
    source = "def handler(event, context):\n    held = []\n    while True:\n        held.append(bytearray(2**24))\n"
    ran = await invoker.run(python_bundle(source))
    assert ran.status == "Failed"
    assert "memory" in ran.error.lower()


async def test_secrets_of_the_attempt_are_not_in_its_log(invoker: TestInvoker) -> None:
    source = "def handler(event, context):\n    print(event['capability_token'], event['lease_token'])\n"
    ran = await invoker.run(python_bundle(source))
    assert ran.task.capability_token not in ran.log
    assert str(ran.task.lease_token) not in ran.log
