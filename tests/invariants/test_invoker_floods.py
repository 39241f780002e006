"""Neighbours can't keep functions from being handed over, and what didn't reach an invoker was not delivered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.functions import invocation
from tracelake.contracts.bundles import Invocation
from tracelake.dispatcher.invoker_client import InvokeOutcome, InvokerClient
from tracelake.serving import local_sockets
from tracelake.settings import Secret
from tracelake.worker.lambda_.invoke_server import (
    MAX_CONNECTIONS,
    MAX_EVENT_BYTES,
    InvokeEndpoint,
    InvokeServer,
)

TOKEN = "tlw_" + "t" * 40
STRANGER = 54321


class Receiver:
    """An invoker that only remembers what it took."""

    def __init__(self) -> None:
        self.taken: list[Invocation] = []

    def take(self, task: Invocation, event: bytes) -> None:
        assert msgspec.json.decode(event, type=Invocation).task_id == task.task_id
        self.taken.append(task)


@contextlib.asynccontextmanager
async def serving(taker: Receiver, listener: socket.socket) -> AsyncIterator[None]:
    endpoint = InvokeEndpoint(taker, Secret(TOKEN))
    server = InvokeServer(endpoint.handle, admit=endpoint.admit, max_body=MAX_EVENT_BYTES)
    await server.start(listener)
    try:
        yield
    finally:
        await server.close()


@pytest.fixture
def client() -> InvokerClient:
    return InvokerClient(lambda: [TOKEN], answer_seconds=60)


@pytest.mark.parametrize(
    "said", [b"", b"POST / HT", b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n"]
)
async def test_idle_connections_of_strangers_make_room_for_functions(
    client: InvokerClient, said: bytes
) -> None:
    taker = Receiver()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    address = listener.getsockname()
    async with serving(taker, listener), contextlib.AsyncExitStack() as held:
        for number in range(MAX_CONNECTIONS + 100):
            _, writer = await asyncio.open_connection(*address)
            held.callback(writer.close)
            writer.write(said)
            if number % 20 == 0:
                handed = await client.invoke(f"http://127.0.0.1:{address[1]}", invocation(None))
                assert handed.outcome is InvokeOutcome.ACCEPTED, handed
        many = [client.invoke(f"http://127.0.0.1:{address[1]}", invocation(None)) for _ in range(30)]
        assert {handed.outcome for handed in await asyncio.gather(*many)} == {InvokeOutcome.ACCEPTED}
    assert len(taker.taken) == 18 + 30


async def test_functions_are_handed_over_by_a_socket_that_no_other_user_reaches(
    client: InvokerClient, tmp_path: Path
) -> None:
    folder = tmp_path / ("deep" * 30) / "invoker-0"
    folder.mkdir(parents=True, mode=0o755)
    taker, path = Receiver(), folder / "invoker.sock"
    async with serving(taker, local_sockets.listen_privately(path)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        handed = await client.invoke(local_sockets.private_address(path), invocation(None))
        assert handed.outcome is InvokeOutcome.ACCEPTED, handed
        if os.getuid() == 0:
            assert await asyncio.to_thread(_reaches, path) == errno.EACCES
    assert len(taker.taken) == 1


def _reaches(path: Path) -> int:
    """What a process of another user is told when it connects."""
    child = os.fork()
    if child == 0:
        told = 99
        try:
            os.chdir(path.parent.parent)
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(f"{path.parent.name}/{path.name}")
            told = 0
        except OSError as error:
            told = error.errno or 98
        finally:
            os._exit(told)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_a_worker_token_is_shown_to_nobody_else(client: InvokerClient, tmp_path: Path) -> None:
    """A socket in a folder that others may write to could be anybody's."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        writer.close()

    folder = tmp_path / "shared"
    folder.mkdir()
    server = await asyncio.start_unix_server(listen, folder / "a.sock")
    folder.chmod(0o777)
    handed = await client.invoke(local_sockets.private_address(folder / "a.sock"), invocation(None))
    assert handed.outcome is InvokeOutcome.AWAY
    folder.chmod(0o700)
    (folder / "b.sock").symlink_to(folder / "a.sock")
    handed = await client.invoke(local_sockets.private_address(folder / "b.sock"), invocation(None))
    assert handed.outcome is InvokeOutcome.AWAY
    server.close()
    assert heard == []


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def pretending(folder: Path, answer: Answer) -> AsyncIterator[str]:
    """Somebody of this user's who listens where an invoker would."""
    served: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        with contextlib.suppress(ConnectionError):
            await answer(reader, writer)

    folder.chmod(0o700)
    server = await asyncio.start_unix_server(accept, folder / "i.sock")
    os.chmod(folder / "i.sock", 0o600)
    try:
        yield local_sockets.private_address(folder / "i.sock")
    finally:
        server.close()
        for writer in served:
            writer.close()


@pytest.mark.parametrize("how", ["cut", "closed", "garbage", "silence", "refused"])
async def test_what_an_invoker_never_asked_for_was_not_delivered(tmp_path: Path, how: str) -> None:
    """Its attempt isn't used up: AWAY is released. The request's body was never sent."""
    heard: list[bytes] = []

    async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        if how == "cut":
            writer.transport.abort()
        elif how == "closed":
            writer.close()
        elif how == "silence":
            await reader.read()
            writer.close()
        else:
            answer = {
                "garbage": b"\x00\x01\r\n\r\n",
                "refused": b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
            }
            writer.write(answer[how])
            writer.close()

    client = InvokerClient(lambda: [TOKEN], answer_seconds=0.2 if how == "silence" else 30.0)
    async with pretending(tmp_path, door) as address:
        handed = await client.invoke(address, invocation(None))
    assert handed.outcome is InvokeOutcome.AWAY, handed
    assert b"capability" not in heard[0]
    assert heard[0].endswith(b"\r\n\r\n")


@pytest.mark.parametrize("how", ["cut", "silence"])
async def test_what_was_sent_whole_and_not_answered_may_have_been_taken(tmp_path: Path, how: str) -> None:
    async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await reader.read(65536)
        if how == "silence":
            await reader.read()
        writer.transport.abort()

    client = InvokerClient(lambda: [TOKEN], answer_seconds=0.5 if how == "silence" else 30.0)
    async with pretending(tmp_path, door) as address:
        handed = await client.invoke(address, invocation(None))
    assert handed.outcome is InvokeOutcome.UNKNOWN, handed


async def test_who_has_no_token_is_answered_before_a_body_is_read() -> None:
    taker = Receiver()
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(taker, listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(
            b"POST /2015-03-31/functions/noop/invocations HTTP/1.1\r\nHost: h\r\nContent-Length: 999999\r\n\r\n"
        )
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
    assert taker.taken == []
