"""What strangers send to a listener is bounded, on each kind that we have: bytes, time, connections.

The limits under test are short, and every test waits for what must happen, not for a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.errors import Invalid, Unauthenticated
from tracelake.evm.devchain import jsonrpc
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.evm.devchain.server import listen
from tracelake.serving import listener, small_http
from tracelake.serving.http_limits import ConnectionLimiter, HttpLimits, Peer, peer_of, tuned
from tracelake.serving.identity import Authentication, Identity
from tracelake.serving.listener import Listener
from tracelake.serving.small_http import ServedRequest, ServedResponse
from tracelake.worker.lambda_.invoke_server import InvokeServer

LONG = HttpLimits(head_seconds=60, body_seconds=60, idle_seconds=60)
SHORT = replace(LONG, head_seconds=0.2, body_seconds=0.2)
FEW = replace(LONG, connections=8, peer_connections=5)
PATIENCE = 60.0
CALL = b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId"}'
GOOD = b"POST / HTTP/1.1\r\nHost: h\r\nX-Token: good\r\nContent-Length: %d\r\n\r\n%b" % (len(CALL), CALL)
MIB = 1024 * 1024


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Takes bodies of those with a credential, and gives ``/large`` to anybody."""
    known = (b"x-token", b"good") in scope["headers"]
    if known:
        scope["state"]["stays"] = True
        while (await receive()).get("more_body"):
            pass
    body = b"x" * (32 * MIB if scope["path"] == "/large" else 2)
    status = 200 if known or scope["path"] == "/large" else 401
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def uvicorn_port(limits: HttpLimits) -> AsyncIterator[int]:
    listener = Listener("test", "127.0.0.1", 0, limits)
    serving = asyncio.create_task(listener.serve(application))
    await listener.started()
    try:
        yield int(listener.url.rpartition(":")[2])
    finally:
        listener.stop()
        await serving
        listener.close()


@contextlib.asynccontextmanager
async def invoker_port(limits: HttpLimits) -> AsyncIterator[int]:
    def admit(request: ServedRequest) -> None:
        if request.headers.get("x-token") != "good":
            raise Unauthenticated("WorkerTokenInvalid", "not a token")

    async def handle(request: ServedRequest) -> ServedResponse:
        return ServedResponse(200, {}, b"{}")

    server = InvokeServer(handle, admit=admit, max_body=100_000, limits=limits)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    await server.start(listener)
    try:
        yield listener.getsockname()[1]
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def devchain_port(limits: HttpLimits) -> AsyncIterator[int]:
    connections: set[asyncio.BaseTransport] = set()
    server = await listen(ChainMethods(DevChain(seed=1)), "127.0.0.1", 0, connections, limits)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in tuple(connections):
            assert isinstance(each, asyncio.Transport)
            each.abort()
        await asyncio.sleep(0)


Port = Callable[[HttpLimits], contextlib.AbstractAsyncContextManager[int]]
EVERY = pytest.mark.parametrize("port", [uvicorn_port, invoker_port, devchain_port])
PRIVATE = pytest.mark.parametrize("port", [uvicorn_port, invoker_port])


async def connect(port: int, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))


async def answer(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, whose body is read; 0 when the connection is cut."""
    try:
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            assert length is not None
            await reader.readexactly(int(length[1]))
            return int(head.split()[1])
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0


async def ask(port: int, said: bytes, source: str = "127.0.0.1") -> int:
    reader, writer = await connect(port, source)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(said)
        return await answer(reader)
    finally:
        writer.transport.abort()


async def until_cut(reader: asyncio.StreamReader) -> bytes:
    said = b""
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                said += piece
    return said


async def pour(port: int, first: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
    """Send without end. How much was taken before the connection was cut, and what was answered."""
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        sent, said = 0, b""
        async with asyncio.timeout(PATIENCE):
            try:
                await loop.sock_sendall(connection, first)
                while sent < most:
                    await loop.sock_sendall(connection, piece)
                    sent += len(piece)
            except ConnectionError:
                pass
            with contextlib.suppress(ConnectionError):
                while got := await loop.sock_recv(connection, 65536):
                    said += got
        return sent, said


HEADS = {
    "a header": (b"POST / HTTP/1.1\r\nX: ", b"x" * 65536),
    "headers": (b"POST / HTTP/1.1\r\n", b"X: y\r\n" * 10_000),
    "a name": (b"POST / HTTP/1.1\r\n", b"x" * 65536),
    "a target": (b"POST /", b"x" * 65536),
    "empty lines": (b"\r\n", b"\r\n" * 32768),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (listener, small_http, jsonrpc):
        monkeypatch.setattr(module, "CUT_SECONDS", 0.1)


@EVERY
@pytest.mark.parametrize("head", HEADS)
async def test_an_endless_head_is_cut_off_and_told_why(port: Port, head: str) -> None:
    async with port(LONG) as number:
        sent, said = await pour(number, *HEADS[head], most=400 * MIB)
        assert sent < 32 * MIB, "only what the kernel holds for a connection that isn't read"
        assert re.match(rb"HTTP/1.1 4(31|00)", said)
        if head not in ("empty lines", "a name"):
            assert said.startswith(b"HTTP/1.1 431")
        assert await ask(number, GOOD) == 200


@EVERY
async def test_a_head_above_32_kib_is_431_and_one_below_is_served(port: Port) -> None:
    async with port(LONG) as number:
        for size, status in ((20_000, 200), (30_000, 200), (33_000, 431), (60_000, 431), (100_000, 431)):
            large = GOOD.replace(b"Host: h", b"Host: h\r\nX: " + b"x" * size)
            assert await ask(number, large) == status


TAILS = {
    "an extension": (b"1;", b"x" * 60_000),
    "a trailer": (b"0\r\nX: ", b"y" * 60_000),
    "trailers": (b"0\r\n", b"X: y\r\n" * 10_000),
}


@pytest.mark.parametrize("tail", TAILS)
async def test_what_surrounds_the_chunks_of_a_body_is_bounded_too(tail: str) -> None:
    begin = b"POST / HTTP/1.1\r\nHost: h\r\nX-Token: good\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    async with uvicorn_port(LONG) as number:
        first, more = TAILS[tail]
        sent, said = await pour(number, begin + first, more, most=100 * MIB)
        assert sent < 32 * MIB
        assert re.match(rb"HTTP/1.1 4(31|00)", said)
        assert await ask(number, begin + b"0\r\n\r\n") == 200


@PRIVATE
async def test_an_endless_body_without_a_credential_is_answered_and_cut(port: Port) -> None:
    async with port(LONG) as number:
        for framing in (b"Content-Length: 4000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
            first = b"POST / HTTP/1.1\r\nHost: h\r\n" + framing
            piece = b"10000\r\n" + b"x" * 65536 + b"\r\n" if b"chunked" in framing else b"x" * 65536
            sent, said = await pour(number, first, piece, most=400 * MIB)
            assert sent < 64 * MIB
            assert said.startswith(b"HTTP/1.1 401")


HALVES = {"nothing": b"", "a line": GOOD[:10], "a head": GOOD[:40], "a body": GOOD[:-5]}


@EVERY
@pytest.mark.parametrize("half", HALVES)
async def test_half_a_request_is_given_up_in_time(port: Port, half: str) -> None:
    async with port(SHORT) as number:
        opened = [await connect(number) for _ in range(20)]
        for _, writer in opened:
            writer.write(HALVES[half])
        for reader, writer in opened:
            said = await until_cut(reader)
            assert said.startswith(b"HTTP/1.1 408") if HALVES[half] else said == b""
            writer.close()
        assert await ask(number, GOOD) == 200


DROPS = {
    "a head": b"POST / HTTP/1.1\r\nX: ",
    "a body": GOOD[: -len(CALL)].replace(b": %d" % len(CALL), b": 99999"),
}


@EVERY
@pytest.mark.parametrize("what", DROPS)
async def test_a_request_that_comes_drop_by_drop_is_given_up(port: Port, what: str) -> None:
    async with port(SHORT) as number:
        reader, writer = await connect(number)
        writer.write(DROPS[what])

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert (await until_cut(reader))[:12] in (b"HTTP/1.1 408", b"")
        dripping.cancel()
        writer.close()


@EVERY
async def test_a_kept_connection_is_good_for_more_requests_however_they_are_cut(port: Port) -> None:
    async with port(LONG) as number:
        reader, writer = await connect(number)
        for place in (*range(1, len(GOOD), 7), len(GOOD)):
            writer.write(GOOD[:place])
            await writer.drain()
            writer.write(GOOD[place:])
            assert await answer(reader) == 200
        writer.write(GOOD * 5)
        assert [await answer(reader) for _ in range(5)] == [200] * 5
        writer.close()


@EVERY
async def test_those_who_say_nothing_make_room_and_callers_are_served(port: Port) -> None:
    async with port(FEW) as number:
        kept_reader, kept_writer = await connect(number)
        kept_writer.write(GOOD)
        assert await answer(kept_reader) == 200
        flood = []
        for _ in range(60):
            flood.append(await connect(number))
            flood[-1][1].write(b"POST / HT")
        assert await ask(number, GOOD) == 200
        kept_writer.write(GOOD)
        assert await answer(kept_reader) == 200
        cut = await asyncio.gather(*(until_cut(reader) for reader, _ in flood[:50]))
        assert set(cut) <= {b""}
        for _, writer in (*flood, (None, kept_writer)):
            writer.transport.abort()


@EVERY
async def test_one_peer_cant_take_the_room_of_another(port: Port) -> None:
    async with port(FEW) as number:
        busy = [await connect(number, "127.0.0.2") for _ in range(FEW.peer_connections)]
        for reader, writer in busy:
            writer.write(GOOD)
            assert await answer(reader) == 200
        assert await ask(number, GOOD, "127.0.0.2") in (503, 0)
        assert await ask(number, GOOD, "127.0.0.3") == 200
        for reader, writer in busy:
            writer.write(GOOD)
            assert await answer(reader) == 200
            writer.transport.abort()


async def test_an_answer_that_nobody_reads_is_given_up() -> None:
    async with uvicorn_port(SHORT) as number:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", number))
            connection.sendall(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
            connection.setblocking(False)
            async with asyncio.timeout(PATIENCE):
                while _is_open(connection):
                    await asyncio.sleep(0.02)


def _is_open(connection: socket.socket) -> bool:
    """By the kernel's word, without reading."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01"


async def test_requests_behind_each_other_without_end_are_cut_off() -> None:
    async with uvicorn_port(SHORT) as number:
        sent, said = await pour(number, b"", b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n" * 1000, most=100 * MIB)
        assert sent < 32 * MIB
        assert said.startswith(b"HTTP/1.1 ")


@EVERY
async def test_many_requests_behind_each_other_are_answered_one_after_the_other(port: Port) -> None:
    """More than wait at a time, in one write."""
    async with port(LONG) as number:
        reader, writer = await connect(number)
        writer.write(GOOD * 2000)
        assert [await answer(reader) for _ in range(2000)] == [200] * 2000
        writer.transport.abort()


ANY = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
HOST = b"Host: x\r\n"
ODD = {
    "many at once": ANY * 40,
    "many at once, then nonsense": ANY * 10 + b"nonsense\r\n\r\n",
    "one, then nonsense": ANY + b"\x00\xff" * 50,
    "one, then a huge head": ANY * 3 + b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000,
    "a large answer, then nonsense": b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" * 3 + b"nonsense\r\n\r\n",
    "a body in the middle of many": ANY * 5 + b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n12345",
    "nonsense behind a body": b"POST / HTTP/1.1\r\nX-Token: good\r\nContent-Length: 2\r\n\r\n{}\x00\x00\x00",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "a length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "a huge length": b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
    "a negative chunk": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{}",
    "a huge chunk": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    "a name with a space": b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    "a zero in a value": b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    "bytes in a path": b"GET /\xff\xfe%zz%ff HTTP/1.1\r\n" + HOST + b"\r\n",
    "half an address": b"GET http://[::1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "an address without a path": b"GET https://x HTTP/1.1\r\n" + HOST + b"\r\n",
    "an authority": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "an upgrade": ANY[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + ANY,
    "a web socket": ANY[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
    "something expected": b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "an old version": b"GET / HTTP/1.0\r\n\r\n" + ANY,
    "no version": b"GET /\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"A" * 200,
    "all bytes": bytes(range(256)) * 4,
}


@EVERY
async def test_nothing_that_a_stranger_sends_writes_a_traceback(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    """However it is cut, and whether or not the stranger stays for the answer."""
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    async with port(SHORT) as number:
        for odd in ODD.values():
            for half_closed in (True, False):
                for cut in (len(odd), max(1, len(odd) - 7), len(odd) // 2):
                    reader, writer = await connect(number)
                    with contextlib.suppress(ConnectionError):
                        writer.write(odd[:cut])
                        await asyncio.sleep(0)
                        writer.write(odd[cut:])
                        if half_closed:
                            writer.write_eof()
                            await asyncio.wait_for(reader.read(100), 1)
                    writer.transport.abort()
        await asyncio.sleep(0.3)
    assert failed == []
    assert [
        record.getMessage()
        for record in caplog.records
        if record.exc_info or record.levelname in ("ERROR", "CRITICAL")
    ] == []


@pytest.mark.parametrize(
    "name", ["CONNECTIONS", "PEER_CONNECTIONS", "HEAD_SECONDS", "BODY_SECONDS", "HEAD_BYTES"]
)
def test_limits_are_set_by_the_environment_within_bounds(name: str) -> None:
    assert getattr(tuned(HttpLimits(), {f"TRACELAKE_HTTP_{name}": "2000"}), name.lower()) == 2000
    for bad in ("0", "-1", "x", "", "1e99", "nan"):
        with pytest.raises(Invalid, match=name):
            tuned(HttpLimits(), {f"TRACELAKE_HTTP_{name}": bad})


def test_peers_are_addresses_and_networks() -> None:
    assert peer_of(("127.0.0.1", 5)) == peer_of(("::ffff:127.0.0.1", 5, 0, 0)) == Peer("127.0.0.1")
    assert peer_of(("2001:db8::1", 5, 0, 0)) == peer_of(("2001:db8::ffff", 5, 0, 0))
    assert peer_of(("2001:db8::1", 5, 0, 0)) != peer_of(("2001:db8:0:1::1", 5, 0, 0))
    assert peer_of("") == Peer("local")


PEERS = (Peer("a"), Peer("b"), Peer("127.0.0.1", 7), Peer("127.0.0.2", 7))


def group_of(visitor: Somebody) -> str:
    return visitor.peer.group


@dataclass(eq=False)
class Somebody:
    peer: Peer
    known: bool = False
    out: list[bool] = field(default_factory=list)

    def evict(self) -> None:
        self.out.append(self.known)


def test_a_user_with_many_addresses_takes_room_from_themselves() -> None:
    door = ConnectionLimiter(HttpLimits(connections=8, peer_connections=4))
    honest = [Somebody(Peer("127.0.0.1", 0), known=True) for _ in range(3)]
    honest.append(Somebody(Peer("127.0.0.1", 0)))
    for each in honest:
        assert door.enter(each)
    for number in range(50):
        assert door.enter(Somebody(Peer(f"127.0.1.{number}", 7)))
    assert not any(each.out for each in honest)


@given(
    st.lists(st.tuples(st.sampled_from(PEERS), st.sampled_from(["come", "show", "go"]), st.integers(0, 9)))
)
def test_a_door_holds_its_limits_keeps_the_known_and_lets_in_while_there_are_strangers(
    acts: list[tuple[Peer, str, int]],
) -> None:
    door = ConnectionLimiter(HttpLimits(connections=5, peer_connections=3))
    inside: list[Somebody] = []
    for peer, act, which in acts:
        if act == "come":
            came = Somebody(peer)
            mine = [each for each in inside if each.peer == peer]
            full = mine if len(mine) >= 3 else inside if len(inside) >= 5 else []
            assert door.enter(came) == (not full or any(not each.known for each in full))
            if full:
                gone = [each for each in inside if each.out]
                assert [each.known for each in gone] == [False] * len(gone)
                assert (
                    gone
                    == [each for each in full if not each.known and group_of(each) == group_of(gone[0])][:1]
                    or not gone
                )
                inside = [each for each in inside if not each.out]
                if not gone:
                    continue
            inside.append(came)
        elif inside and act == "show":
            inside[which % len(inside)].known = True
        elif inside:
            door.leave(inside.pop(which % len(inside)))
        assert len(door) == len(inside)


@pytest.mark.parametrize(
    ("identity", "stays"), [(Identity.WORKER, True), (Identity.USER, True), (Identity.TASK, False)]
)
async def test_a_tasks_connections_make_room_for_those_of_workers(identity: Identity, stays: bool) -> None:
    """An operator could fill the port with connections that each have shown its token once."""

    async def found(scope: Any) -> str:
        return "somebody"

    scope: Any = {"state": {}}
    await Authentication({identity: found}).check(scope, identity)
    assert scope["state"]["stays"] is stays
