"""Rows reach their receiver once and in order, whatever the receiver answers and whichever process dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest
import pytest_asyncio

from tests.support.buffer_scene import open_buffer_scene
from tests.support.delivery_scene import KEY, DeliveryScene, Received, Receiver, Reply, accept
from tests.support.mail_server import MailServerOfTest
from tests.support.proxies import CuttingProxy
from tracelake.contracts.deliveries import (
    DeliveryLoad,
    DeliveryLoaded,
    DeliveryMessage,
    DeliveryPlan,
    DeliveryReport,
    DeliveryReported,
    FinalityWait,
    MessagesReplayed,
    PlannedRow,
)
from tracelake.contracts.dispatcher_api import ClaimRequest
from tracelake.delivery.addresses import Allowance, SystemNames
from tracelake.delivery.delivery_task import DeliveryTask, Patience
from tracelake.delivery.rows import RowPlanner
from tracelake.delivery.targets import Receiver as Target
from tracelake.dispatcher.steps.deliveries import KEEP_DAYS
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Conflict, Invalid, NotFound
from tracelake.domain.standard_webhooks import SignatureVerdict, decode_secret, verify
from tracelake.embedded.postgres import Cluster
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.postgres import sqlfiles
from tracelake.store.deliveries import SQL as DELIVERIES

METRICS = sqlfiles.load("tracelake.store.sql", "metrics.sql")
SLOW = Patience(backoff=Backoff(3600, 3600), look_seconds=0.2, refresh_seconds=0.1)
SHORT_LEASE = """UPDATE job SET heartbeat_timeout_seconds = 1, retry_base_seconds = 0
                 WHERE operator = 'delivery'"""


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeliveryScene]:
    with open_buffer_scene(cluster, tmp_path_factory.mktemp("deliveries")) as buffers:
        scene = DeliveryScene(buffers, Receiver())
        scene.deploy()
        sink = buffers.sink("sink")
        asyncio.run(sink.start())
        yield scene
        asyncio.run(sink.close())


@pytest_asyncio.fixture
async def scene(deployed: DeliveryScene) -> AsyncIterator[DeliveryScene]:
    """With a receiver of its own; the deliveries of the test before are gone."""
    deployed.deploy()
    # A name of its own: counts outlive a removal.
    deployed.name = f"ops-{uuid4().hex[:8]}"
    deployed.receiver = Receiver()
    await deployed.receiver.open()
    yield deployed
    await deployed.receiver.close()
    await deployed.buffers.close()


async def test_a_row_is_posted_once_signed_and_with_its_key(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery(where="severity = 'critical'", template="{{severity}}: {{payload.msg}}"))
    publisher = await scene.buffers.publisher()
    async with scene.delivering():
        await publisher.publish(
            {"key": "a", "severity": "critical", "note": "one", "payload": {"msg": "big"}},
            {"key": "b", "severity": "info", "note": "two"},
        )
        await scene.until_received(1)
        await scene.until_recorded(sent=1, waiting=0)
    [received] = scene.receiver.received
    body = received.json
    assert (body["type"], body["text"], body["data"]["note"]) == ("row", "critical: big", "one")
    assert (
        verify(
            [decode_secret(KEY)],
            message_id=received.headers["webhook-id"],
            timestamp=received.headers["webhook-timestamp"],
            signature=received.headers["webhook-signature"],
            body=received.body,
            now=int(received.headers["webhook-timestamp"]),
        )
        is SignatureVerdict.VALID
    )
    assert received.headers["idempotency-key"] == received.headers["webhook-id"]


async def _execute(dsn: str, statement: str, *arguments: object) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement, *arguments)
    finally:
        await connection.close()


async def _fetch(scene: DeliveryScene, query: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(scene.buffers.site.databases.state_dsn)
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()


async def published(scene: DeliveryScene, *keys: str, **more: object) -> None:
    publisher = await scene.buffers.publisher()
    await publisher.publish(*({"key": key, "note": key, **more} for key in keys))
    await scene.buffers.until_has(*keys)


async def claimed(scene: DeliveryScene) -> tuple[DispatcherClient, tuple[UUID, int, UUID]]:
    """The delivery's task, held by this test: what a process would call, and its fence."""
    client = scene.buffers.client()
    [task] = scene.buffers.site.client.tasks(dag="alerting", job=f"{scene.name}.delivery").tasks
    [lease] = await client.claim([ClaimRequest(task.task_id, "tester", uuid4().hex)])
    assert lease.lease_token is not None
    return client, (lease.task_id, lease.attempt, lease.lease_token)


async def test_rows_that_python_cannot_hold_stop_nothing_behind_them(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery(template="{{payload.n}}"))
    async with scene.delivering():
        await published(scene, "huge", payload=msgspec.Raw(b'{"n": 1e5000}'))
        # The sink's client writes this one as infinity.
        await published(scene, "late", happened_at="9999-12-31T23:59:59.999999Z")
        await published(scene, "behind", payload={"n": 7})
        await scene.until_recorded(sent=2, dead=1, waiting=0)
    first, second = scene.receiver.received
    assert json.loads(first.body, parse_int=str)["data"]["payload"]["n"] == "1" + "0" * 5000
    assert (second.json["text"], second.json["data"]["note"]) == ("7", "behind")
    [letter] = scene.show(state="dead").messages
    assert "happened_at can't be read" in (letter.error or "")
    assert scene.show().last_error == letter.error


async def test_a_delivery_whose_attempts_fail_shows_why_until_one_does_not(
    scene: DeliveryScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> NoReturn:
        raise ValueError("the planner is broken")

    scene.deploy(scene.delivery())
    with monkeypatch.context() as patched:
        patched.setattr(RowPlanner, "add", broken)
        async with scene.delivering():
            await published(scene, "w1")
            await scene.until("the reason", lambda: scene.show().status == "failing")
    assert "the planner is broken" in (scene.show().last_error or "")
    async with scene.delivering():
        await scene.until_recorded(sent=1)
        assert scene.show().failing_since is None


async def test_a_replay_whose_answer_is_lost_is_sent_all_the_same(
    scene: DeliveryScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = refuse("lost-answer")
    real = DispatcherClient.load_delivery
    lost: list[int] = []

    async def load(client: DispatcherClient, request: DeliveryLoad) -> DeliveryLoaded:
        found = await real(client, request)
        if found.messages and not request.begin and not lost:
            lost.extend(each.message_id for each in found.messages)
            # What the client does about it: the very same request again.
            found = await real(client, request)
        return found

    monkeypatch.setattr(DispatcherClient, "load_delivery", load)
    async with scene.delivering():
        await published(scene, "lost-answer")
        await scene.until_recorded(dead=1, waiting=0)
        scene.receiver.answer = accept
        assert replay(scene).replayed == 1
        await scene.until_recorded(sent=1, waiting=0)
    assert lost == [each.message_id for each in scene.show().messages]


async def test_a_load_brings_what_the_process_does_not_hold_however_often_it_is_repeated(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    client, fence = await claimed(scene)
    at = (await client.load_delivery(DeliveryLoad(*fence, begin=True, holds=[]))).position
    rows = [PlannedRow(f"rec_{each}", 1, 1, f"rec_{each}", "{}", datetime.now(UTC)) for each in range(4)]
    planned = await client.plan_delivery(DeliveryPlan(*fence, at, at + 4, rows))
    first, second, third, fourth = (each.message_id for each in planned.messages)
    await client.report_delivery(DeliveryReport(*fence, starting=[fourth]))

    async def loaded(limit: int, **more: list[int]) -> list[int]:
        found = await client.load_delivery(DeliveryLoad(*fence, limit=limit, **more))
        return [each.message_id for each in found.messages]

    # One of which a try is under way is the process's, whether it still names it or not.
    assert [await loaded(2, holds=[first]) for _ in range(2)] == [[second, third]] * 2
    assert await loaded(1, holds=[first, third]) == [second]
    assert await loaded(5, holds=[first, second, third]) == []
    # As a process of the version before asks.
    assert await loaded(5) == []


async def test_a_row_that_is_retracted_after_it_was_sent_is_retracted_there(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    async with scene.delivering():
        await published(scene, "r1", "r2")
        await scene.until_recorded(sent=2)
        await scene.retract("r1")
        await scene.until_recorded(sent=2, retracted=1)
    bodies = scene.receiver.bodies()
    [taken_back] = [body for body in bodies if body["type"] == "retracted"]
    [first] = [body for body in bodies if body["id"] == taken_back["id"] and body["type"] == "row"]
    assert (taken_back["data"], first["data"]["note"]) == (first["data"], "r1")
    keys = [each.headers["idempotency-key"] for each in scene.receiver.received]
    assert len(set(keys)) == 3


async def test_a_row_that_is_retracted_before_it_was_sent_is_never_sent(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    # A server's error would leave in doubt whether it has the row.
    scene.receiver.answer = lambda _: (429, {}, b"not now")
    async with scene.delivering(patience=SLOW):
        await published(scene, "n1")
        await scene.until_received(1)
        await scene.until("its failure", lambda: scene.show().failing_since is not None)
        await scene.retract("n1")
        await scene.until_recorded(waiting=0)
        scene.receiver.answer = accept
        await published(scene, "n2")
        await scene.until_recorded(sent=1, retracted=0, waiting=0)
    assert [body["data"]["note"] for body in scene.receiver.bodies()] == ["n1", "n2"]
    assert {each.state for each in scene.show().messages} == {"dropped", "sent"}


async def test_a_row_whose_try_failed_at_the_server_is_retracted_there_and_not_tried_again(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = lambda _: (500, {}, b"after its work was done")
    async with scene.delivering(patience=SLOW):
        await published(scene, "failed-1")
        await scene.until("its failure", lambda: scene.show().failing_since is not None)
        scene.receiver.answer = accept
        await scene.retract("failed-1")
        # It needn't wait for the row's next try.
        await scene.until_recorded(retracted=1, waiting=0)
    retracted, row = scene.show().messages
    assert (retracted.kind, retracted.state, row.state) == ("retracted", "sent", "dropped")
    assert "one may have arrived" in (row.error or "")
    assert scene.receiver.notes() == [("row", "failed-1"), ("retracted", "failed-1")]


async def test_a_row_that_is_retracted_during_a_try_that_fails_is_not_tried_again(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    held = asyncio.Event()

    async def late() -> Reply:
        await held.wait()
        return 503, {}, b""

    scene.receiver.answer = lambda _: late()
    async with scene.delivering():
        await published(scene, "during")
        await scene.until_received(1)
        await scene.retract("during")
        await scene.until_recorded(waiting=2)
        scene.receiver.answer = accept
        held.set()
        await scene.until_recorded(retracted=1, waiting=0)
    assert scene.receiver.notes() == [("row", "during"), ("retracted", "during")]


async def test_a_dead_letter_whose_row_was_retracted_since_is_not_replayed(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    # A proxy's answer: the receiver may have done its work.
    scene.receiver.answer = lambda _: (502, {}, b"")
    async with scene.delivering():
        await published(scene, "dead-1")
        await scene.until_recorded(dead=1, waiting=0)
        scene.receiver.answer = accept
        await scene.retract("dead-1")
        await scene.until_recorded(retracted=1, waiting=0, dead=0)
        assert scene.buffers.site.client.replay_delivery("alerting", scene.name).replayed == 0
    assert scene.receiver.notes()[-1] == ("retracted", "dead-1")


def refuse(*notes: str, status: int = 400) -> Callable[[Received], Reply]:
    def answer(received: Received) -> Reply:
        data = received.json["data"]
        return (status, {}, b"no") if data["note"] in notes else accept(received)

    return answer


def replay(scene: DeliveryScene, *ids: int) -> MessagesReplayed:
    return scene.buffers.site.client.replay_delivery("alerting", scene.name, ids or None)


async def test_a_dead_letter_is_not_replayed_over_a_newer_revision(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = refuse("over")
    async with scene.delivering():
        await published(scene, "over")
        await scene.until_recorded(dead=1, waiting=0)
        await scene.rewrite("over", "new")
        await scene.until_recorded(sent=1, waiting=0, dead=0)
        scene.receiver.answer = accept
        assert (replay(scene).replayed, replay(scene).skipped) == (0, [])
        newer, older = scene.show().messages
        done = replay(scene, older.message_id)
        await published(scene, "after")
        await scene.until_recorded(sent=2, waiting=0)
    assert (done.replayed, [each.state for each in done.skipped]) == (0, ["dropped"])
    assert (older.error or "").startswith(
        f"message {newer.message_id} of its record is newer; before: it answered"
    )
    assert done.skipped[0].error == older.error
    assert scene.receiver.notes()[-2:] == [("row", "new"), ("row", "after")]


async def test_a_dead_retraction_is_not_replayed_over_the_row_that_came_again(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    async with scene.delivering():
        await published(scene, "back")
        await scene.until_recorded(sent=1)
        scene.receiver.answer = refuse("back")
        await scene.retract("back")
        await scene.until_recorded(dead=1, waiting=0)
        await scene.rewrite("back", "back2")
        await scene.until_recorded(sent=2, waiting=0, dead=0)
        scene.receiver.answer = accept
        assert replay(scene).replayed == 0
        # The retraction of what came again isn't taken for the one that was given up.
        await scene.retract("back")
        await scene.until_recorded(retracted=1, waiting=0)
    assert scene.receiver.notes()[-2:] == [("row", "back2"), ("retracted", "back2")]


async def test_a_retraction_that_may_have_arrived_is_followed_by_the_same_row_again(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    async with scene.delivering():
        await published(scene, "same")
        await scene.until_recorded(sent=1)
        scene.receiver.answer = refuse("same", status=500)
        await scene.retract("same")
        await scene.until_recorded(dead=1, waiting=0)
        scene.receiver.answer = accept
        await scene.rewrite("same", "same")
        await scene.until_recorded(sent=2, waiting=0, dead=0)
    assert scene.receiver.notes()[-1] == ("row", "same")


async def test_a_letter_that_is_given_up_while_a_newer_one_waits_is_not_kept(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    held = asyncio.Event()

    async def late() -> Reply:
        await held.wait()
        return 400, {}, b""

    scene.receiver.answer = lambda received: (
        late() if received.json["data"]["note"] == "w" else accept(received)
    )
    async with scene.delivering():
        await published(scene, "w")
        await scene.until_received(1)
        await scene.rewrite("w", "w2")
        await scene.until_recorded(waiting=2)
        held.set()
        await scene.until_recorded(sent=1, waiting=0, dead=0)
    assert [each.state for each in scene.show().messages] == ["sent", "dropped"]


async def test_a_letter_that_was_repeated_unchanged_is_still_replayed(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    held = asyncio.Event()

    async def late() -> Reply:
        await held.wait()
        return 400, {}, b""

    scene.receiver.answer = lambda _: late()
    async with scene.delivering():
        await published(scene, "u")
        await scene.until_received(1)
        await scene.rewrite("u", "u")
        await scene.until("the repeated row", lambda: len(scene.show().messages) == 2)
        held.set()
        await scene.until_recorded(dead=1, waiting=0)
        scene.receiver.answer = accept
        assert replay(scene).replayed == 1
        await scene.until_recorded(sent=1, dead=0)


async def test_a_message_that_comes_back_after_a_newer_one_was_sent_is_not_tried(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = refuse("z")
    async with scene.delivering():
        await published(scene, "z")
        await scene.until_recorded(dead=1, waiting=0)
        await scene.rewrite("z", "z2")
        await scene.until_recorded(sent=1, waiting=0)
        received = len(scene.receiver.received)
        # As a replay leaves it that the next revision overtook.
        await _execute(
            scene.buffers.site.databases.state_dsn,
            "UPDATE delivery_message SET state = 'waiting', tries = 0, handed = false, finished_at = NULL "
            "WHERE message_id = $1",
            scene.show().messages[1].message_id,
        )
        await scene.until_recorded(waiting=0)
    assert len(scene.receiver.received) == received
    assert "went before it" in (scene.show().messages[1].error or "")


async def test_a_finalized_delivery_sends_what_the_chain_made_final_and_never_what_it_took_back(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery(when="finalized"), scene.delivery("at-once"))
    # Two tasks, of ten blocks each.
    first, second = await scene.buffers.publisher(), await scene.buffers.publisher()
    async with scene.delivering():
        await first.publish({"key": "f1", "note": "f1"})
        await scene.buffers.until_has("f1")
        [(_, end)] = await scene.buffers.rows("SELECT key, scope_end FROM {} WHERE key = 'f1'")
        await first.publish({"key": "f2", "note": "f2", "block_number": end + 3})
        await scene.buffers.until_has("f2")
        await second.publish({"key": "f3", "note": "f3", "block_number": end + 2})
        await scene.buffers.until_has("f3")
        await scene.until_recorded("at-once", sent=3)
        assert scene.show().sent == 0
        await scene.finalize(end)
        await scene.until_recorded(sent=1)
        # The row that holds f3 back is taken back before it is final.
        await scene.retract("f2")
        await scene.until_recorded("at-once", sent=3, retracted=1)
        await scene.finalize(end + 2)
        await scene.until_recorded(sent=2)
        # And one that was final when it was retracted, as no chain should do, is retracted there.
        await scene.retract("f3")
        await scene.until_recorded(sent=2, retracted=1)
    finalized = [
        (each["type"], each["data"]["note"])
        for each in scene.receiver.bodies()
        if each["delivery"] == f"alerting/{scene.name}"
    ]
    assert finalized == [("row", "f1"), ("row", "f3"), ("retracted", "f3")]


async def test_a_chain_that_stands_still_holds_back_its_own_rows_alone_also_over_a_restart(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery(when="finalized"))
    publisher = await scene.buffers.publisher()
    async with scene.delivering():
        await publisher.publish({"key": "halted", "note": "halted", "block_number": 5000})
        await scene.buffers.until_has("halted")
        await scene.until("what it waits for", lambda: len(scene.show().waits_for) == 1)
        await publisher.publish({"key": "beside", "note": "beside", "block_number": 6000})
        await scene.buffers.until_has("beside")
        # A producer that no chain is behind.
        await scene.rewrite("beside", "beside", producer="alerting/src")
        await scene.until_recorded(sent=1)
        await publisher.publish({"key": "later", "note": "later", "block_number": 1})
        await scene.buffers.until_has("later")
    [waits] = scene.show().waits_for
    assert (waits.producer, waits.block) == ("alerting/work", 5000)
    assert scene.show().behind > 0
    gauges = [row for row in await _fetch(scene, METRICS.deliveries) if row["name"] == scene.name]
    assert [row["behind"] > 0 and row["held_seconds"] > 0 for row in gauges] == [True]
    async with scene.delivering():
        await scene.finalize(4999)
        await scene.until("the process has it", lambda: scene.show().status == "sending")
        assert scene.show().waits_for == [waits]
        await scene.finalize(5000)
        await scene.until_recorded(sent=3, waiting=0, behind=0)
        assert scene.show().waits_for == []
    assert [note for _, note in scene.receiver.notes()] == ["beside", "halted", "later"]


async def test_rows_of_a_producer_that_waited_become_messages_once(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery(when="finalized"))
    client, fence = await claimed(scene)
    at = (await client.load_delivery(DeliveryLoad(*fence, begin=True))).position
    waits = [FinalityWait("alerting/work", at + 1, 9)]
    await client.plan_delivery(DeliveryPlan(*fence, at, at + 5, waited=[], waits=waits))
    # A process of the version before knows of no waits, and ends none.
    await client.plan_delivery(DeliveryPlan(*fence, at + 5, at + 6))
    assert (await client.load_delivery(DeliveryLoad(*fence))).waits == waits
    row = PlannedRow("rec_1", 1, 1, "rec_1", "{}", datetime.now(UTC))
    caught_up = DeliveryPlan(*fence, at + 6, at + 6, [row], waited=waits, waits=[])
    assert len((await client.plan_delivery(caught_up)).messages) == 1
    with pytest.raises(Conflict, match="planned before"):
        await client.plan_delivery(caught_up)


async def test_a_row_of_a_block_that_no_chain_has_is_given_up_and_the_others_go_on(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery(when="finalized"))
    publisher = await scene.buffers.publisher()
    await scene.finalize(7000)
    async with scene.delivering():
        await publisher.publish({"key": "absurd", "note": "absurd", "block_number": 10**15})
        await scene.buffers.until_has("absurd")
        await scene.until("what it waits for", lambda: len(scene.show().waits_for) == 1)
        await scene.report_head(7100)
        await scene.until_recorded(dead=1, behind=0)
        await publisher.publish({"key": "good", "note": "good", "block_number": 6999})
        await scene.until_recorded(sent=1)
        [letter] = scene.show(state="dead").messages
        assert "far above 7100" in (letter.error or "")
        assert replay(scene).replayed == 1
        await scene.until_recorded(sent=2, dead=0)
    assert [note for _, note in scene.receiver.notes()] == ["good", "absurd"]


async def test_a_channel_and_a_mailbox_get_each_row_and_its_retraction(scene: DeliveryScene) -> None:
    scene.deploy(
        scene.delivery(to={"slack": {"url_secret": "HOOK"}}, template="{{severity}}: {{note}}"),
        scene.delivery(
            "mail",
            to={"email": {"smtp_secret": "MAIL", "from": "a@b.example", "to": ["c@d.example"]}},
            template="{{severity}}: {{note}}",
        ),
    )
    note = "<!channel> & co\r\nBcc: victim@inner.example"
    async with MailServerOfTest() as server:
        mail = {"TRACELAKE_SECRET_MAIL": f"smtp://127.0.0.1:{server.port}"}
        async with scene.delivering(secrets=mail):
            publisher = await scene.buffers.publisher()
            await publisher.publish({"key": "box", "note": note, "severity": "critical"})
            for name in (scene.name, "mail"):
                await scene.until_recorded(name, sent=1)
            await scene.retract("box")
            for name in (scene.name, "mail"):
                await scene.until_recorded(name, retracted=1)
    said = "critical: &lt;!channel&gt; &amp; co\r\nBcc: victim@inner.example"
    assert scene.receiver.bodies() == [{"text": said}, {"text": f"[retracted] {said}"}]
    first, back = server.mails
    assert (first.recipients, first.mail["Bcc"], first.mail["Subject"]) == (
        ("c@d.example",),
        None,
        "critical: <!channel> & co",
    )
    assert back.mail["Subject"] == "[retracted] critical: <!channel> & co"
    assert back.mail["Message-ID"] != first.mail["Message-ID"]


@pytest.mark.parametrize("template", ["<https://ops.example|open> {{note}}", None], ids=["template", "none"])
async def test_what_waits_is_written_for_the_receiver_that_gets_it(
    scene: DeliveryScene, template: str | None
) -> None:
    slack = {"slack": {"url_secret": "HOOK"}}
    more = {} if template is None else {"template": template}
    scene.deploy(scene.delivery(**more))
    note = f"<!channel> & {uuid4().hex}"
    publisher = await scene.buffers.publisher()
    async with scene.delivering():
        await publisher.publish({"key": note, "note": note})
        await scene.until_recorded(sent=1)
    scene.deploy(scene.delivery(to=slack, **more))
    async with scene.delivering():
        await scene.retract(note)
        await scene.until_recorded(retracted=1)
        await scene.rewrite(note, f"{note} again")
        await scene.until_recorded(sent=2)
    scene.deploy(scene.delivery(**more))
    async with scene.delivering():
        await scene.retract(note)
        await scene.until_recorded(retracted=2)
    row, in_channel, again, back = scene.receiver.bodies()
    escaped = note.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if template is not None:
        own = "<https://ops.example|open>"
        assert row["text"] == f"{own} {note}"
        assert in_channel == {"text": f"[retracted] {own} {escaped}"}
        assert again == {"text": f"{own} {escaped} again"}
        assert back["text"] == f"[retracted] {own} {note} again"
    else:
        assert "text" not in row | back
        assert in_channel["text"].startswith("[retracted] ")
        assert again["text"] == in_channel["text"].removeprefix("[retracted] ").replace(
            f"note={escaped}", f"note={escaped} again"
        )
        assert f"note={escaped}, " in in_channel["text"] or in_channel["text"].endswith(f"note={escaped}")
        assert "None" not in in_channel["text"]
    assert back["data"]["note"] == f"{note} again"


async def test_a_receiver_that_refuses_gets_twelve_tries_with_one_key_then_a_dead_letter(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = lambda _: (500, {}, b"<b>broken</b>")
    async with scene.delivering():
        await published(scene, "d1")
        await scene.until_recorded(dead=1, waiting=0)
        assert len(scene.receiver.received) == 12
        assert len({each.headers["idempotency-key"] for each in scene.receiver.received}) == 1
        [letter] = scene.show(state="dead").messages
        assert (letter.tries, letter.status) == (12, 500)
        assert "broken" in (letter.error or "")
        scene.receiver.answer = accept
        assert scene.buffers.site.client.replay_delivery("alerting", scene.name).replayed == 1
        await scene.until_recorded(dead=0, sent=1)
    assert len({each.headers["idempotency-key"] for each in scene.receiver.received}) == 1


async def test_a_dead_letter_that_is_too_large_is_named_by_a_replay_and_can_be_dropped(
    scene: DeliveryScene,
) -> None:
    client = scene.buffers.site.client
    scene.deploy(scene.delivery())
    publisher = await scene.buffers.publisher()
    async with scene.delivering():
        await publisher.publish({"key": "large", "note": "x" * 300_000})
        await scene.until_recorded(dead=1, waiting=0)
    found = scene.show()
    [letter] = found.messages
    assert (found.replayable, found.too_large) == (0, [letter.message_id])
    assert found.newest_dead is not None
    assert "bytes as JSON" in (found.newest_dead.error or "")
    for ids in (None, [letter.message_id]):
        replayed = client.replay_delivery("alerting", scene.name, ids)
        assert (replayed.replayed, [each.message_id for each in replayed.skipped]) == (0, [letter.message_id])
    for act in (client.replay_delivery, client.drop_messages):
        with pytest.raises(NotFound, match="has no message 99999"):
            act("alerting", scene.name, [99999])
    with pytest.raises(Invalid):
        client.drop_messages("alerting", scene.name)
    assert client.drop_messages("alerting", scene.name, [letter.message_id]).dropped == 1
    found = scene.show()
    assert (found.dead, found.newest_dead, [each.state for each in found.messages]) == (0, None, ["dropped"])
    again = client.drop_messages("alerting", scene.name, [letter.message_id])
    assert (again.dropped, again.not_dead) == (0, [letter.message_id])
    assert client.drop_messages("alerting", scene.name, everything=True).dropped == 0
    audited = await _fetch(scene, "SELECT action, subject FROM audit WHERE action = 'drop delivery messages'")
    subject = {"delivery": f"alerting/{scene.name}", "messages": 1}
    assert [json.loads(row["subject"]) for row in audited] == [subject]


async def test_a_dead_letter_is_kept_until_a_person_decides(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = refuse("kept letter")
    async with scene.delivering():
        await published(scene, "kept letter")
        await scene.until_recorded(dead=1)
        await published(scene, "sent and forgotten")
        await scene.until_recorded(sent=1)
    dsn = scene.buffers.site.databases.state_dsn
    await _execute(dsn, "UPDATE delivery_message SET finished_at = finished_at - interval '31 days'")
    # As the Dispatcher does now and then.
    await _execute(dsn, DELIVERIES.collect, KEEP_DAYS, 1000)
    assert [each.state for each in scene.show().messages] == ["dead"]
    scene.receiver.answer = accept
    async with scene.delivering():
        assert replay(scene).replayed == 1
        await scene.until_recorded(sent=2, dead=0)


async def test_a_cause_that_is_gone_is_not_shown_beside_an_old_dead_letter(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = refuse("old letter")
    async with scene.delivering():
        await published(scene, "old letter")
        await scene.until_recorded(dead=1)
        await published(scene, "good one")
        await scene.until_recorded(sent=1)
    async with scene.delivering(secrets={"TRACELAKE_SECRET_HOOK": ""}):
        await scene.until("the cause", lambda: scene.show().status == "failing")
    async with scene.delivering():
        await scene.until("it is cured", lambda: scene.show().status == "sending")
        assert scene.show().failing_since is None
    assert scene.show().dead == 1


async def test_a_receiver_that_is_gone_pauses_its_delivery_and_loses_nothing(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    scene.receiver.answer = lambda _: (410, {}, b"")
    async with scene.delivering():
        await published(scene, "g1")
        await scene.until("the pause", lambda: scene.show().status == "gone")
        assert scene.show().paused_by == ["receiver_gone"]
        await published(scene, "g2")
        scene.receiver.answer = accept
        assert scene.buffers.site.client.resume_delivery("alerting", scene.name).paused_by == []
        await scene.until_recorded(sent=2, waiting=0)


async def test_once_a_pause_is_answered_nothing_more_is_sent_and_nothing_is_lost(
    scene: DeliveryScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.deploy(scene.delivery())
    client = scene.buffers.site.client
    real = DispatcherClient.report_delivery
    refused: list[int] = []

    async def report(client: DispatcherClient, request: DeliveryReport) -> DeliveryReported:
        answer = await real(client, request)
        if answer.paused:
            refused.extend(request.starting)
        return answer

    monkeypatch.setattr(DispatcherClient, "report_delivery", report)
    async with scene.delivering():
        await published(scene, "paused-1")
        await scene.until_recorded(sent=1)
        # The process learns of it with its next heartbeat, seconds later.
        assert client.pause_delivery("alerting", scene.name).paused_by == ["person"]
        await published(scene, "paused-2")
        await scene.until("a try that may not begin", lambda: len(refused) > 2)
        assert (scene.show().waiting, scene.receiver.notes()) == (1, [("row", "paused-1")])
        client.resume_delivery("alerting", scene.name)
        await scene.until_recorded(sent=2, waiting=0)
    assert [each.tries for each in scene.show().messages] == [1, 1]


@pytest.mark.parametrize(("code", "status"), [(410, "gone"), (500, "failing")])
async def test_a_resume_tries_at_once_what_waits_for_another_try(
    scene: DeliveryScene, code: int, status: str
) -> None:
    scene.deploy(scene.delivery())
    client = scene.buffers.site.client
    scene.receiver.answer = lambda _: (code, {}, b"")
    patience = Patience(backoff=Backoff(3600, 3600), gone_seconds=3600, look_seconds=0.2, refresh_seconds=0.1)
    async with scene.delivering(patience=patience):
        await published(scene, f"resumed-{code}")
        await scene.until("the refusal", lambda: scene.show().status == status)
        if code == 500:
            client.pause_delivery("alerting", scene.name)
        scene.receiver.answer = accept
        client.resume_delivery("alerting", scene.name)
        assert scene.show().failing_since is None
        await scene.until_recorded(sent=1, waiting=0)


async def test_a_refusal_from_before_the_resume_does_not_pause_the_delivery_again(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    released = asyncio.Event()

    async def late() -> Reply:
        await released.wait()
        return 410, {}, b""

    first = iter([late()])
    scene.receiver.answer = lambda _: next(first, None) or (410, {}, b"")
    async with scene.delivering():
        await published(scene, "late1", "late2")
        await scene.until("the pause", lambda: scene.show().status == "gone")
        scene.receiver.answer = accept
        assert scene.buffers.site.client.resume_delivery("alerting", scene.name).paused_by == []
        released.set()
        await scene.until_recorded(sent=2, waiting=0)
        assert scene.show().paused_by == []


async def test_retry_after_holds_back_the_whole_delivery(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    turns = iter([(429, {"Retry-After": "1"}, b"")])
    times: list[float] = []

    def slow_down(_: Received) -> Reply:
        times.append(asyncio.get_running_loop().time())
        return next(turns, (200, {}, b""))

    scene.receiver.answer = slow_down
    async with scene.delivering():
        await published(scene, "t1")
        await scene.until_received(1)
        await published(scene, "t2")
        await scene.until_recorded(sent=2)
    # Never a limit on how long it took: only that nothing came too early.
    assert min(times[1:]) - times[0] >= 0.99


async def test_a_hang_a_flood_a_redirect_and_a_closed_connection_cost_one_try_each(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    never = asyncio.Event()

    async def hang() -> Reply:
        await never.wait()
        return accept(scene.receiver.received[0])

    answers = iter(
        [
            lambda: hang(),
            lambda: None,
            lambda: (302, {"Location": "http://169.254.169.254/latest"}, b""),
            lambda: (500, {}, b"x" * 10_000_000),
            lambda: (200, {}, b"x" * 10_000_000),
        ]
    )
    scene.receiver.answer = lambda _: next(answers)()
    async with scene.delivering(try_seconds=1.0):
        await published(scene, "h1")
        await scene.until_recorded(sent=1, waiting=0)
    [sent] = scene.show().messages
    assert (sent.state, sent.tries) == ("sent", 5)


async def test_messages_of_one_key_keep_their_order_and_hold_up_no_others(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery(key="severity"))
    refused: list[str] = []

    def refuse_first(received: Received) -> Reply:
        note = received.json["data"]["note"]
        if note == "k1" and len(refused) < 3:
            refused.append(note)
            return 500, {}, b""
        return accept(received)

    scene.receiver.answer = refuse_first
    publisher = await scene.buffers.publisher()
    async with scene.delivering(in_flight=8):
        await publisher.publish(
            *({"key": note, "note": note, "severity": "one"} for note in ("k1", "k2", "k3")),
            {"key": "k4", "note": "k4", "severity": "other"},
        )
        await scene.until_recorded(sent=4)
    notes = [note for _, note in scene.receiver.notes()]
    assert [note for note in notes if note != "k4"] == ["k1"] * 4 + ["k2", "k3"]
    assert notes.index("k4") < notes.index("k2")


async def test_a_missing_secret_is_shown_and_nothing_is_tried(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery(to={"webhook": {"url_secret": "NOT_THERE"}}))
    async with scene.delivering():
        # Before there is a row.
        await scene.until("the reason", lambda: "NOT_THERE" in (scene.show().last_error or ""))
        assert scene.show().status == "failing"
    async with scene.delivering(secrets={"TRACELAKE_SECRET_NOT_THERE": scene.receiver.url}):
        await scene.until("its end", lambda: scene.show().status == "sending")
    async with scene.delivering():
        await scene.until("the reason", lambda: scene.show().status == "failing")
        await published(scene, "m1")
        await scene.until_recorded(waiting=1)
    assert (scene.show().waiting, scene.receiver.received) == (1, [])


async def test_an_inner_address_that_is_not_allowed_is_never_reached(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    async with scene.delivering(
        secrets={"TRACELAKE_SECRET_HOOK": f"https://127.0.0.1:{scene.receiver.port}/"}, allowance=Allowance()
    ):
        await published(scene, "i1", "i2", "i3")
        await scene.until("the reason", lambda: scene.show().status == "failing")
        # The address is looked at again and again.
        seen = scene.show().last_error_at
        await scene.until("another look", lambda: scene.show().last_error_at != seen)
    shown = scene.show()
    assert "the secret HOOK can't be used" in (shown.last_error or "")
    assert "TRACELAKE_DELIVERY_ALLOW" in (shown.last_error or "")
    assert (shown.waiting, shown.dead, {each.tries for each in shown.messages}) == (3, 0, {0})
    assert scene.receiver.received == []
    async with scene.delivering():
        await scene.until_recorded(sent=3)
    assert {each.tries for each in scene.show().messages} == {1}


def _damaged(file: Path) -> None:
    file.write_text("no sign")


def _exposed(file: Path) -> None:
    file.chmod(0o644)


@pytest.mark.parametrize("spoil", [_damaged, _exposed, Path.unlink], ids=["damaged", "exposed", "absent"])
async def test_while_the_secrets_cannot_be_read_nothing_is_tried_and_nothing_is_cut_off(
    scene: DeliveryScene, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    scene.deploy(scene.delivery())
    released = asyncio.Event()

    async def late() -> Reply:
        await released.wait()
        return 200, {}, b""

    def usable(file: Path) -> None:
        file.write_text("beside=other")
        file.chmod(0o600)

    file = tmp_path / "secrets"
    usable(file)
    before, meanwhile = (f"{name} {uuid4().hex}" for name in ("before", "meanwhile"))
    scene.receiver.answer = lambda _: late()
    async with scene.delivering(secrets_file=file):
        await published(scene, before)
        await scene.until_received(1)
        spoil(file)
        await published(scene, meanwhile)
        await scene.until("the reason", lambda: scene.show().status == "failing")
        assert "the secrets of the delivery process can't be read" in (scene.show().last_error or "")
        released.set()
        await scene.until_recorded(sent=1, waiting=1)
        usable(file)
        await scene.until_recorded(sent=2, waiting=0)
    assert [note for _, note in scene.receiver.notes()] == [before, meanwhile]
    assert {each.tries for each in scene.show().messages} == {1}


async def test_while_an_address_is_looked_at_again_the_process_waits(
    scene: DeliveryScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, asked = 0, 0
    take = DeliveryTask._take

    def counted(task: DeliveryTask, target: Target) -> list[DeliveryMessage]:
        nonlocal looks
        looks += 1
        return take(task, target)

    async def slow(_names: SystemNames, _host: str, _port: int) -> list[str]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.5)
        return ["10.0.0.1"]

    monkeypatch.setattr(DeliveryTask, "_take", counted)
    monkeypatch.setattr(SystemNames, "__call__", slow)
    scene.deploy(scene.delivery())
    secrets = {"TRACELAKE_SECRET_HOOK": "https://inside.example/"}
    async with scene.delivering(secrets=secrets, allowance=Allowance()):
        await published(scene, "looked-1", "looked-2", "looked-3")
        await scene.until("the reason", lambda: scene.show().status == "failing")
        before = asked
        await scene.until("more looks", lambda: asked >= before + 3)
    assert looks < 1000


async def test_killed_between_a_try_and_its_record_it_is_sent_again_under_the_same_key(
    scene: DeliveryScene,
) -> None:
    scene.deploy(scene.delivery())
    await _execute(scene.buffers.site.databases.state_dsn, SHORT_LEASE)
    answered = asyncio.Event()

    async def late() -> Reply:
        await answered.wait()
        return 200, {}, b""

    scene.receiver.answer = lambda _: late()
    first = scene.process("killed")
    try:
        await first.start()
        await published(scene, "x1")
        await scene.until_received(1)
        await first.kill()
    finally:
        await first.close()
    answered.set()
    async with scene.delivering():
        await scene.until_recorded(sent=1, waiting=0)
    keys = [each.headers["idempotency-key"] for each in scene.receiver.received]
    assert len(keys) >= 2
    assert len(set(keys)) == 1


async def test_of_two_processes_one_sends_and_the_other_takes_over(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    async with scene.delivering() as stop, scene.delivering():
        await published(scene, *(f"p{each}" for each in range(20)))
        await scene.until_recorded(sent=20)
        stop.set()
        await published(scene, "p-last")
        await scene.until_recorded(sent=21)
    assert len(scene.receiver.received) == 21


async def test_cut_off_from_the_data_database_it_goes_on_where_it_was(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    async with CuttingProxy(scene.reading_dsn) as proxy, scene.delivering(data_read_dsn=proxy.dsn):
        await published(scene, "c1")
        await scene.until_recorded(sent=1)
        assert proxy.cut_all() > 0
        await published(scene, "c2")
        await scene.until_recorded(sent=2)
    assert [note for _, note in scene.receiver.notes()] == ["c1", "c2"]


async def test_while_the_dispatcher_restarts_nothing_is_lost(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery())
    async with scene.delivering():
        await published(scene, "s1")
        await scene.until_recorded(sent=1)
        replica = scene.buffers.site.replica
        replica.stop()
        await asyncio.sleep(0)
        replica.resume()
        await published(scene, "s2")
        await scene.until_recorded(sent=2)
    assert [note for _, note in scene.receiver.notes()] == ["s1", "s2"]


async def test_a_changed_delivery_goes_on_and_a_removed_one_stops(scene: DeliveryScene) -> None:
    scene.deploy(scene.delivery(template="one {{note}}"))
    async with scene.delivering():
        await published(scene, "v1")
        await scene.until_recorded(sent=1)
        scene.deploy(scene.delivery(template="two {{note}}"))
        await scene.until("the new definition", lambda: scene.show().template == "two {{note}}")
        await published(scene, "v2")
        await scene.until_recorded(sent=2)
        scene.deploy()
        await published(scene, "v3")
        scene.deploy(scene.delivery("other"))
        await published(scene, "v4")
        await scene.until_recorded("other", sent=1)
    assert [body["text"] for body in scene.receiver.bodies()[:1]] == ["one v1"]
    assert [note for _, note in scene.receiver.notes()] == ["v1", "v2", "v4"]
