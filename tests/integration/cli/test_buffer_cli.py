"""``tracelake buffers``: what people see of buffered datasets, and what they can do about dead letters."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from tests.support.conversation import Conversation, dag, source
from tests.support.query_port import served
from tests.support.surfaces import open_surfaces
from tracelake.cli import failures
from tracelake.cli.main import app
from tracelake.contracts.buffers import BufferBatch, DeadLetterRequest
from tracelake.dispatcher.steps.buffered_datasets import record_dead_letter
from tracelake.dispatcher.steps.context import StepContext

SCHEMA = {"columns": {"key": "text", "severity": "text"}, "unique": ["key"]}
DAG = dag(source(), publish={"alerts": {"storage": "postgres", "write_mode": "buffered", "schema": SCHEMA}})


class Shell:
    """The command line in this process, against a port that is served in it."""

    def __init__(self, url: str, token: str) -> None:
        self._where = ("--url", url, "--token", token)

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(self._run, *arguments)

    def _run(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                failures.run(lambda: app(["buffers", *arguments, *self._where]), debug=False)
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
        return code, out.getvalue(), err.getvalue()

    async def said(self, *arguments: str) -> str:
        code, out, err = await self.run(*arguments)
        assert code == 0, err
        return out

    async def told(self, *arguments: str) -> Any:
        return json.loads(await self.said(*arguments, "--json"))


async def add_dead_letter(talk: Conversation, reason: str) -> int:
    """A dead letter of the sink, which holds its task already or takes it now."""
    rows = await talk.query("SELECT task_id, attempt, lease_token FROM task WHERE status = 'Running'")
    if not rows:
        await talk.lease("alerts.sink")
        return await add_dead_letter(talk, reason)
    output = await talk.output("alerts.sink")
    batch = BufferBatch(
        batch_id=uuid4(),
        dataset_uuid=output["dataset_uuid"],
        dataset_version=output["dataset_version"],
        schema_hash="sha256:0",
        producer="chain/watch",
        task_id=uuid4(),
        attempt=1,
        revision=0,
        row_count=1,
        scope_start=7,
        scope_end=9,
        records='[{"key":"\\u001b[31mred"}]',
    )
    message = msgspec.to_builtins(batch)
    fence = dict(rows[0])
    request = DeadLetterRequest(
        **fence, dataset_uuid=batch.dataset_uuid, message=message, reason=reason, tries=3
    )
    return (await record_dead_letter(talk.ctx, request)).dead_letter_id


async def test_dead_letters_are_listed_shown_sent_again_and_dropped(ctx: StepContext) -> None:
    talk = Conversation(ctx)
    async with open_surfaces(ctx) as surfaces, served(surfaces.user_app) as url:
        shell = Shell(url, surfaces.user_token)
        assert await shell.said("list") == "no buffered datasets\n"
        await talk.deploy(DAG)
        first, second, third = [await add_dead_letter(talk, f"row {n} is bad") for n in range(3)]

        [header, line] = (await shell.said("list")).splitlines()
        assert header.split() == ["DATASET", "DAG", "WAITING", "OLDEST", "DEAD", "POSITION", "SINK"]
        assert line.split() == ["alerts", "chain", "0", "+", "?", "-", "3", "-", "Running"]
        shown = await shell.said("show", "alerts", "--limit", "2")
        assert "key text, severity text" in shown
        assert "row 1 is bad" in shown
        assert "row 2 is bad" not in shown
        letter = await shell.said("show", "alerts", "--letter", str(first))
        assert "7-9" in letter
        assert '[{"key":" [31mred"}]' in letter.replace("\\u001b", " ")
        assert (await shell.told("show", "alerts"))["next"] is None

        assert await shell.said("replay", "alerts", str(first)) == "1 dead letter sent again\n"
        assert await shell.told("drop", "alerts", str(second)) == {"dropped": 1}
        assert (await shell.told("list"))["buffers"][0]["dead_letters"] == 1
        assert (await shell.told("list"))["buffers"][0]["undelivered"] == 1
        assert await shell.said("drop", "alerts", "--all") == "1 dead letter dropped\n"
        assert (await shell.run("show", "alerts", "--letter", str(third)))[0] == 1


@pytest.mark.parametrize("arguments", [("drop", "alerts"), ("drop", "alerts", "1", "--all")])
async def test_nothing_is_dropped_for_want_of_an_argument(arguments: tuple[str, ...]) -> None:
    code, _, err = await Shell("http://127.0.0.1:9", "tlu_x").run(*arguments)
    assert code == 2
    assert "give --all" in err


async def test_an_unknown_dataset_is_said_to_be_unknown(ctx: StepContext) -> None:
    async with open_surfaces(ctx) as surfaces, served(surfaces.user_app) as url:
        shell = Shell(url, surfaces.user_token)
        for command in (("show",), ("replay",), ("drop", "--all")):
            code, _, err = await shell.run(command[0], "nobody", *command[1:])
            assert code != 0
            assert "there is no buffered dataset nobody" in err
