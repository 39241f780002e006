"""Every call to the Dispatcher is repeated until it is answered, and what was refused is raised."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from tracelake.contracts.dispatcher_api import ClaimRequest, EventIn, HeartbeatRequest
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound, Unauthenticated, Unavailable
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.settings import Secret
from tracelake.worker.calls import chunks

Answer = tuple[int, dict[str, Any]]
HANG_UP: Answer = (0, {})


class Server:
    """Answers with what stands in ``answers`` next, or by ``rule``; 0 hangs up without a word."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.rule: Callable[[str], Answer] = lambda _: (200, {})
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *rest = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in rest)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                path = line.split(" ")[1]
                self.asked.append((path, headers, body))
                status, answer = self.answers.pop(0) if self.answers else self.rule(path)
                if not status:
                    return
                content = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
                )
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


@asynccontextmanager
async def dispatcher() -> AsyncIterator[tuple[Server, DispatcherClient]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = DispatcherClient(f"http://127.0.0.1:{port}/", Secret("worker-token"))
    try:
        yield server, client
    finally:
        await client.close()
        listening.close()


def problem(status: int, reason: str) -> Answer:
    return status, {"status": status, "reason": reason, "detail": f"because {reason}"}


BEAT = HeartbeatRequest(uuid4(), 1, uuid4())
FINE: Answer = (200, {"lease_expires_at": None, "cancel": False, "pause": True})


async def test_an_outage_of_any_kind_is_waited_out() -> None:
    async with dispatcher() as (server, client):
        server.answers = [
            HANG_UP,
            problem(503, "Unavailable"),
            (500, {}),
            problem(429, "Slow"),
            problem(408, "RequestTimeout"),
            problem(401, "BadWorkerToken"),
            FINE,
        ]
        assert (await client.heartbeat(BEAT)).pause is True
        assert len(server.asked) == 7
        assert {headers["x-trace-worker-token"] for _, headers, _ in server.asked} == {"worker-token"}


async def test_a_refusal_is_raised_at_once_as_what_it_is() -> None:
    async with dispatcher() as (server, client):
        server.answers = [problem(409, "StaleAttempt")]
        with pytest.raises(Conflict) as refusal:
            await client.heartbeat(BEAT)
        assert (refusal.value.reason, refusal.value.message) == ("StaleAttempt", "because StaleAttempt")
        assert len(server.asked) == 1


async def test_it_gives_up_when_the_time_is_over() -> None:
    async with dispatcher() as (server, client):
        server.rule = lambda _: HANG_UP
        with pytest.raises(Unavailable, match="didn't answer in time"):
            await client.heartbeat(BEAT, until=asyncio.get_running_loop().time() + 0.2)


async def test_a_wrong_worker_token_is_noticed_at_the_start() -> None:
    async with dispatcher() as (server, client):
        server.answers = [HANG_UP, problem(401, "BadWorkerToken")]
        with pytest.raises(Unauthenticated):
            await client.check()
        server.answers = [problem(404, "UnknownTask")]
        await client.check()


async def test_an_invoker_registers_through_an_outage() -> None:
    async with dispatcher() as (server, client):
        server.answers = [HANG_UP, (200, {"url": "http://here", "again_in_seconds": 5.0})]
        await client.register_invoker("http://here", 3)
        assert [json.loads(body) for _, _, body in server.asked] == [
            {"url": "http://here", "concurrency": 3}
        ] * 2
        server.answers = [problem(422, "Invalid")]
        with pytest.raises(Invalid):
            await client.register_invoker("http://here", 3)


async def test_a_bundle_is_fetched_in_parts_once_the_dispatcher_answers() -> None:
    async with dispatcher() as (server, client):
        server.answers = [HANG_UP, problem(503, "Unavailable"), (200, {"zip": "x" * 100_000})]
        parts = [part async for part in client.fetch_bundle("0" * 64)]
        assert json.loads(b"".join(parts)) == {"zip": "x" * 100_000}
        assert [path for path, _, _ in server.asked] == [f"/internal/bundle?sha256={'0' * 64}"] * 3
        assert {headers["x-trace-worker-token"] for _, headers, _ in server.asked} == {"worker-token"}


async def test_a_bundle_that_is_not_there_is_not_waited_for() -> None:
    async with dispatcher() as (server, client):
        server.answers = [problem(404, "UnknownBundle")]
        with pytest.raises(NotFound) as missing:
            [part async for part in client.fetch_bundle("0" * 64)]
        assert missing.value.reason == "UnknownBundle"


async def test_a_bundle_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 x\r\nContent-Length: 10\r\n\r\nhalf")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = DispatcherClient(
        f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", Secret("worker-token")
    )
    with pytest.raises(Unavailable) as broken:
        [part async for part in client.fetch_bundle("0" * 64)]
    assert broken.value.reason == "BundleNotFetched"
    await client.close()
    listening.close()


async def test_one_claim_goes_alone_and_several_go_together() -> None:
    async with dispatcher() as (server, client):
        claims = [ClaimRequest(uuid4(), "worker", "key") for _ in range(2)]
        answers = [
            {"status": "NotClaimed", "task_id": str(claim.task_id), "reason": "NotFound"} for claim in claims
        ]
        server.answers = [(200, answers[0]), (200, {"claims": answers})]
        await client.claim(claims[:1])
        assert [answer.task_id for answer in await client.claim(claims)] == [each.task_id for each in claims]
        assert [path for path, _, _ in server.asked] == ["/internal/task-claim", "/internal/task-claim-batch"]


async def test_a_claim_whose_answer_was_lost_is_repeated_with_the_same_key() -> None:
    async with dispatcher() as (server, client):
        claim = ClaimRequest(uuid4(), "worker", "key")
        answer = {"status": "NotClaimed", "task_id": str(claim.task_id), "reason": "Completed"}
        server.answers = [HANG_UP, (200, answer)]
        await client.claim([claim])
        first, second = (body for _, _, body in server.asked)
        assert first == second
        assert json.loads(first)["claim_key"] == "key"


async def test_records_are_published_with_the_attempts_own_token_and_its_refusal_is_passed_on() -> None:
    async with dispatcher() as (server, client):
        server.answers = [
            (200, {"accepted": 1}),
            problem(403, "NotYourDataset"),
            problem(401, "TokenExpired"),
        ]
        assert await client.publish({"records": []}, Secret("capability")) == {"accepted": 1}
        assert server.asked[0][1]["x-trace-task-capability"] == "capability"
        with pytest.raises(Forbidden):
            await client.publish({"records": []}, Secret("capability"))
        with pytest.raises(Unauthenticated):
            await client.publish({"records": []}, Secret("capability"))


def test_events_are_cut_into_what_one_request_may_carry() -> None:
    events = [EventIn(cursor=number) for number in range(2500)]
    assert [len(chunk) for chunk in chunks(events)] == [1000, 1000, 500]
    assert [event for chunk in chunks(events) for event in chunk] == events
    long = [EventIn(dataset="x" * 200, id="y", reason="z" * 1000, cursor=1) for _ in range(1000)]
    assert len(chunks(long)) == 2
    assert chunks([]) == []
