"""One suite of behaviours that every queue driver passes.

Drivers are opened with their fallback poll put out of reach, so whatever arrives here arrives by a
signal or because it was due, never by looking again and again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from tests.support.postgres import CloneDatabase
from tracelake.domain.errors import Invalid, TooLarge
from tracelake.queue.base import MAX_BODY_BYTES, Message, Queue, QueueDepth
from tracelake.queue.postgres import PostgresQueue
from tracelake.queue.postgres_install import install, migrate

LONG = 600.0
SHORT = 0.25
FOREVER = 3600.0
PATIENCE = 30.0
OpenQueue = Callable[[], Awaitable[Queue]]


def build(dsn: str) -> None:
    async def migrated() -> None:
        connection = await asyncpg.connect(dsn)
        await migrate(connection)
        await connection.close()

    asyncio.run(migrated())


@pytest.fixture
def queue_database(clone_database: CloneDatabase) -> str:
    return clone_database("queue", build)


@asynccontextmanager
async def pg_clients(admin_dsn: str) -> AsyncIterator[OpenQueue]:
    """Clients under the role that workers get: it suffices for all that the contract asks."""
    role = f"queue_user_{uuid4().hex[:12]}"
    await install(admin_dsn, role=role, password="drawn-by-lot")
    dsn = urlunsplit(urlsplit(admin_dsn)._replace(netloc=as_user(admin_dsn, role, "drawn-by-lot")))
    async with AsyncExitStack() as stack:

        async def opened() -> Queue:
            client = await PostgresQueue.open(dsn, max_receives=3, fallback_poll_seconds=FOREVER)
            stack.push_async_callback(client.close)
            await client.listening()
            return client

        yield opened
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    await admin.close()


def as_user(dsn: str, user: str, password: str) -> str:
    return f"{user}:{password}@{urlsplit(dsn).netloc.rpartition('@')[2]}"


@pytest.fixture(params=["pg"])
async def open_queue(queue_database: str) -> AsyncIterator[OpenQueue]:
    """Opens one more client of the same queue server, as another process would; three receives at most."""
    async with pg_clients(queue_database) as opened:
        yield opened


@pytest.fixture
async def queue(open_queue: OpenQueue) -> Queue:
    return await open_queue()


async def take(
    queue: Queue, name: str = "work", *, visibility: float = LONG, most: int = 10
) -> list[Message]:
    """The wait is beyond the test's patience: its last look, when it is over, can't be what succeeds."""
    async with asyncio.timeout(PATIENCE):
        return await queue.receive(
            name, max_messages=most, wait_seconds=FOREVER, visibility_seconds=visibility
        )


async def take_one(queue: Queue, name: str = "work", *, visibility: float = LONG) -> Message:
    [message] = await take(queue, name, visibility=visibility)
    return message


async def test_a_published_message_is_received_whole(queue: Queue) -> None:
    body = {"task_id": "a", "nested": {"n": [1, 2.5, None, True]}, "text": "snow ☃ and a zero \x00"}
    [message_id] = await queue.publish("work", [body])
    message = await take_one(queue)
    assert message.body == body
    assert message.id == message_id
    assert message.receive_count == 1
    assert message.enqueued_at.tzinfo is not None


async def test_a_batch_comes_in_the_order_of_publishing(queue: Queue) -> None:
    ids = await queue.publish("work", [{"n": n} for n in range(30)])
    ids += await queue.publish("work", [{"n": 30}])
    first, second = await take(queue, most=20), await take(queue, most=20)
    assert [message.body["n"] for message in first + second] == list(range(31))
    assert [message.id for message in first + second] == ids


async def test_a_head_start_is_received_before_what_has_waited_for_less(queue: Queue) -> None:
    await queue.publish("work", [{"n": "bulk"}])
    await queue.publish("work", [{"n": "first"}, {"n": "second"}], head_start=600)
    await queue.publish("work", [{"n": "a little"}], head_start=60)
    [first] = await queue.receive("work", max_messages=1)
    others = await queue.receive("work", max_messages=10)
    assert [each.body["n"] for each in (first, *others)] == ["first", "second", "a little", "bulk"]
    await queue.publish("work", [{"n": "late"}], delay=60, head_start=600)
    assert await queue.receive("work") == [], "it makes nothing visible early"


async def test_a_receive_takes_no_more_than_the_bytes_that_it_may(queue: Queue) -> None:
    await queue.publish("work", [{"n": n, "text": "x" * 100_000} for n in range(6)] + [{"n": 6}, {"n": 7}])
    taken: list[list[Message]] = []
    while sum(len(messages) for messages in taken) < 8:
        taken.append(await queue.receive("work", max_messages=100, wait_seconds=5, max_bytes=250_000))
    assert [len(messages) for messages in taken] == [3, 3, 2]
    assert [message.body["n"] for messages in taken for message in messages] == list(range(8))
    await queue.publish("work", [{"text": "x" * 100_000}])
    assert len(await queue.receive("work", max_bytes=1)) == 1, "one always comes, or a large one never would"


async def test_an_empty_batch_publishes_nothing(queue: Queue) -> None:
    assert await queue.publish("work", []) == []
    assert await queue.depths() == {}


async def test_an_empty_queue_answers_an_empty_list(queue: Queue) -> None:
    assert await queue.receive("work") == []
    assert await queue.receive("work", wait_seconds=0.05) == []


async def test_queues_do_not_see_each_others_messages(queue: Queue) -> None:
    await queue.publish("left", [{"side": "left"}])
    assert await queue.receive("right") == []
    assert (await take_one(queue, "left")).body == {"side": "left"}


async def test_a_received_message_is_hidden_from_others(queue: Queue, open_queue: OpenQueue) -> None:
    other = await open_queue()
    await queue.publish("work", [{}])
    await take_one(queue)
    assert await other.receive("work") == []


async def test_an_unacknowledged_message_is_delivered_again_when_its_visibility_ends(queue: Queue) -> None:
    await queue.publish("work", [{"n": 1}])
    first = await take_one(queue, visibility=SHORT)
    second = await take_one(queue)
    assert (second.id, second.body, second.receive_count) == (first.id, first.body, 2)
    assert second.receipt != first.receipt
    assert second.enqueued_at == first.enqueued_at


async def test_an_acknowledged_message_is_gone(queue: Queue) -> None:
    await queue.publish("work", [{}, {}])
    messages = await take(queue, visibility=0)
    assert await queue.ack([message.receipt for message in messages]) == []
    assert await queue.receive("work") == []
    assert await queue.depth("work") == QueueDepth()


async def test_a_receipt_outlives_its_visibility_until_the_next_delivery(queue: Queue) -> None:
    await queue.publish("work", [{}])
    message = await take_one(queue, visibility=0)
    assert await queue.ack([message.receipt]) == []


async def test_a_stale_receipt_acknowledges_nothing_and_is_named(queue: Queue) -> None:
    await queue.publish("work", [{"n": 1}, {"n": 2}])
    stale, other = await take(queue, visibility=0)
    again = (await take(queue, most=1))[0]
    assert again.id == stale.id
    assert await queue.ack([stale.receipt, other.receipt]) == [stale.receipt]
    assert (await queue.depth("work")).in_flight == 1
    assert await queue.ack([again.receipt]) == []


async def test_a_second_acknowledgement_is_stale(queue: Queue) -> None:
    await queue.publish("work", [{}])
    receipt = (await take_one(queue)).receipt
    assert await queue.ack([receipt]) == []
    assert await queue.ack([receipt]) == [receipt]


async def test_a_stale_receipt_neither_extends_nor_releases_nor_buries(queue: Queue) -> None:
    await queue.publish("work", [{}])
    stale = (await take_one(queue, visibility=0)).receipt
    await take_one(queue)
    assert await queue.extend([stale], visibility_seconds=0) == [stale]
    assert await queue.release([stale]) == [stale]
    assert await queue.dead_letter([stale], "no") == [stale]
    assert (await queue.depth("work")).in_flight == 1


async def test_extending_keeps_a_message_hidden(queue: Queue) -> None:
    await queue.publish("work", [{}])
    message = await take_one(queue, visibility=1.0)
    assert await queue.extend([message.receipt], visibility_seconds=LONG) == []
    assert await queue.receive("work", wait_seconds=1.2) == []
    assert await queue.ack([message.receipt]) == []


async def test_extending_counts_from_now(queue: Queue) -> None:
    await queue.publish("work", [{}])
    message = await take_one(queue, visibility=600)
    assert await queue.extend([message.receipt], visibility_seconds=SHORT) == []
    assert (await take_one(queue)).receive_count == 2


async def test_a_lapsed_delivery_cannot_be_extended(queue: Queue) -> None:
    await queue.publish("work", [{}])
    message = await take_one(queue, visibility=0)
    assert await queue.extend([message.receipt], visibility_seconds=LONG) == [message.receipt]
    assert (await queue.depth("work")).visible == 1


async def test_a_released_message_is_visible_at_once_to_others(queue: Queue, open_queue: OpenQueue) -> None:
    other = await open_queue()
    await queue.publish("work", [{}])
    message = await take_one(queue)
    waiting = asyncio.create_task(take_one(other))
    assert await queue.release([message.receipt]) == []
    assert (await waiting).receive_count == 2


async def test_a_delayed_message_appears_when_it_is_due(queue: Queue) -> None:
    await queue.publish("later", [{}], delay=LONG)
    assert await queue.receive("later") == []
    assert (await queue.depth("later")).delayed == 1
    await queue.publish("work", [{}], delay=SHORT)
    assert (await take_one(queue)).receive_count == 1


async def test_a_long_poll_is_woken_by_a_publish_of_its_own_process(queue: Queue) -> None:
    waiting = asyncio.create_task(take_one(queue))
    served, _ = await asyncio.wait([waiting], timeout=SHORT)
    assert not served
    await queue.publish("work", [{"n": 1}])
    assert (await waiting).body == {"n": 1}


async def test_a_long_poll_is_woken_by_a_publish_of_another_process(
    queue: Queue, open_queue: OpenQueue
) -> None:
    other = await open_queue()
    for n in range(20):
        waiting = asyncio.create_task(take_one(queue))
        await other.publish("work", [{"n": n}])
        message = await waiting
        assert message.body == {"n": n}
        assert message.receive_count == 1
        await queue.ack([message.receipt])


async def test_a_burst_reaches_every_waiting_receiver(queue: Queue, open_queue: OpenQueue) -> None:
    other = await open_queue()
    waiting = [asyncio.create_task(take(queue, most=1)) for _ in range(6)]
    served, _ = await asyncio.wait(waiting, timeout=SHORT)
    assert not served
    await other.publish("work", [{"n": n} for n in range(6)])
    received = [message.body["n"] for messages in await asyncio.gather(*waiting) for message in messages]
    assert sorted(received) == list(range(6))


async def test_eight_receivers_share_two_thousand_messages_without_a_double(open_queue: OpenQueue) -> None:
    total = 2000
    clients = [await open_queue() for _ in range(4)]
    seen: Counter[int] = Counter()

    async def drain(client: Queue) -> None:
        while seen.total() < total:
            messages = await client.receive("work", max_messages=7, wait_seconds=0.2, visibility_seconds=600)
            seen.update(message.body["n"] for message in messages)
            assert await client.ack([message.receipt for message in messages]) == []

    async def fill() -> None:
        for start in range(0, total, 50):
            await clients[0].publish("work", [{"n": n} for n in range(start, start + 50)])

    await asyncio.gather(fill(), *(drain(client) for client in clients * 2))
    assert seen == Counter(range(total))
    assert await clients[0].depths() == {}


async def test_a_message_received_too_often_becomes_a_dead_letter_with_its_reason(queue: Queue) -> None:
    await queue.publish("work", [{"poison": True}])
    for count in (1, 2, 3):
        assert (await take_one(queue, visibility=0)).receive_count == count
    await queue.publish("work", [{"poison": False}])
    assert (await take_one(queue)).body == {"poison": False}
    [letter] = await queue.dead_letters("work")
    assert letter.body == {"poison": True}
    assert letter.receive_count == 3
    assert "3 times" in letter.reason
    assert letter.dead_at >= letter.enqueued_at
    assert (await queue.depth("work")).dead == 1
    assert await queue.dead_letters("elsewhere") == []


async def test_the_receive_that_buries_goes_on_to_the_next_message(queue: Queue) -> None:
    await queue.publish("work", [{"n": n} for n in range(3)])
    for _ in range(3):
        assert len(await take(queue, most=3, visibility=0)) == 3
    await queue.publish("work", [{"n": 3}])
    [message] = await queue.receive("work", max_messages=3)
    assert message.body == {"n": 3}
    assert [letter.body["n"] for letter in await queue.dead_letters("work")] == [0, 1, 2]


async def test_a_message_can_be_given_up_with_a_reason(queue: Queue) -> None:
    await queue.publish("work", [{"n": 1}])
    message = await take_one(queue)
    assert await queue.dead_letter([message.receipt], "schema does not match") == []
    [letter] = await queue.dead_letters("work")
    assert (letter.id, letter.body, letter.reason) == (message.id, {"n": 1}, "schema does not match")
    assert await queue.ack([message.receipt]) == [message.receipt]


async def test_a_redriven_letter_starts_afresh(queue: Queue) -> None:
    await queue.publish("work", [{"n": 1}])
    await queue.dead_letter([(await take_one(queue)).receipt], "broken")
    waiting = asyncio.create_task(take_one(queue))
    [letter] = await queue.dead_letters("work")
    assert await queue.redrive("elsewhere", [letter.id]) == 0
    assert await queue.redrive("work", [letter.id]) == 1
    message = await waiting
    assert (message.body, message.receive_count) == ({"n": 1}, 1)
    assert await queue.dead_letters("work") == []
    assert await queue.redrive("work", [letter.id]) == 0


async def test_a_discarded_letter_is_gone(queue: Queue) -> None:
    await queue.publish("work", [{"n": 1}])
    await queue.dead_letter([(await take_one(queue)).receipt], "broken")
    [letter] = await queue.dead_letters("work")
    assert await queue.discard("work", [letter.id]) == 1
    assert await queue.discard("work", [letter.id]) == 0
    assert await queue.depths() == {}


async def test_depth_tells_visible_from_in_flight_from_delayed(queue: Queue) -> None:
    await queue.publish("work", [{} for _ in range(5)])
    await queue.publish("work", [{}], delay=LONG)
    await queue.publish("other", [{}])
    await take(queue, most=2)
    depth = await queue.depth("work")
    assert (depth.visible, depth.in_flight, depth.delayed, depth.dead) == (3, 2, 1, 0)
    depths = await queue.depths()
    assert sorted(depths) == ["other", "work"]
    assert depths["work"].oldest_age_seconds >= depth.oldest_age_seconds > 0
    assert await queue.depth("unheard-of") == QueueDepth()


async def test_purge_empties_one_queue(queue: Queue) -> None:
    await queue.publish("work", [{}, {}, {}])
    await queue.publish("other", [{}])
    message = (await take(queue, most=1))[0]
    assert await queue.purge("work") == 3
    assert await queue.ack([message.receipt]) == [message.receipt]
    assert list(await queue.depths()) == ["other"]


async def test_durable_calls_behave_like_the_others(queue: Queue) -> None:
    await queue.publish("work", [{"n": 1}], durable=True)
    message = await take_one(queue)
    assert await queue.ack([message.receipt], durable=True) == []
    assert await queue.depths() == {}


async def test_the_largest_body_passes_and_a_larger_one_is_refused_with_its_batch(queue: Queue) -> None:
    fitting = {"x": "a" * (MAX_BODY_BYTES - len('{"x":""}'))}
    await queue.publish("work", [fitting])
    assert (await take_one(queue)).body == fitting
    await queue.purge("work")
    with pytest.raises(TooLarge) as refused:
        await queue.publish("work", [{}, {"x": fitting["x"] + "a"}])
    assert refused.value.reason == "MessageTooLarge"
    assert await queue.depths() == {}


@pytest.mark.parametrize("body", [{"x": object()}, {"x": 2**80}, {1: "x"}], ids=["object", "huge", "key"])
async def test_what_is_no_json_object_is_refused(queue: Queue, body: dict[str, object]) -> None:
    with pytest.raises(Invalid) as refused:
        await queue.publish("work", [body])
    assert refused.value.reason == "BadBody"


@pytest.mark.parametrize("name", ["", "Work", "1st", "a b", "x" * 81, "työ", "a\n"])
async def test_a_name_that_some_driver_cannot_carry_is_refused(queue: Queue, name: str) -> None:
    with pytest.raises(Invalid) as refused:
        await queue.publish(name, [{}])
    assert refused.value.reason == "BadQueueName"


async def test_arguments_out_of_range_are_refused(queue: Queue) -> None:
    for arguments in (
        {"max_messages": 0},
        {"max_messages": 1001},
        {"max_bytes": 0},
        {"wait_seconds": -1},
        {"visibility_seconds": float("nan")},
        {"visibility_seconds": 1e9},
    ):
        with pytest.raises(Invalid):
            await queue.receive("work", **arguments)
    with pytest.raises(Invalid):
        await queue.publish("work", [{}], delay=-1)


@pytest.mark.parametrize("receipt", ["", "1", "1.x", "x." + "0" * 32, "9" * 40 + "." + "0" * 32])
async def test_what_never_was_a_receipt_is_refused(queue: Queue, receipt: str) -> None:
    with pytest.raises(Invalid) as refused:
        await queue.ack([receipt])
    assert refused.value.reason == "BadReceipt"
