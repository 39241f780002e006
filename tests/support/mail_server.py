"""A small SMTP server on loopback that keeps what it is given, refuses what it should, and can be hostile.

async with MailServerOfTest(tls=authority.serving("127.0.0.1")) as server: ...
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import SMTP
from typing import Self


@dataclass(frozen=True, slots=True)
class ReceivedMail:
    """The envelope, and the mail itself."""

    sender: str
    recipients: tuple[str, ...]
    raw: bytes
    was_tls: bool
    login: tuple[str, str] | None

    @property
    def mail(self) -> EmailMessage:
        return message_from_bytes(self.raw, policy=SMTP)

    @property
    def text(self) -> str:
        return str(self.mail.get_content())


@dataclass(slots=True)
class MailServerOfTest:
    """``answers`` replaces what it says to a command: whole lines; an empty text hangs;
    ``RCPT ADDRESS`` is of that recipient. ``implicit``: TLS from the
    first byte, as with smtps; otherwise STARTTLS is offered when there is ``tls``. ``injected`` follows the answer
    to STARTTLS in the same packet."""

    tls: ssl.SSLContext | None = None
    implicit: bool = False
    answers: Mapping[str, str] = field(default_factory=dict)
    injected: bytes = b""
    mails: list[ReceivedMail] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, ssl=self.tls if self.implicit else None
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for each in tuple(self._connections):
            each.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, EOFError, asyncio.CancelledError):
                await _Conversation(self, reader, writer).hold()
        finally:
            self._connections.discard(task)
            writer.transport.abort()


class _Conversation:
    def __init__(
        self, server: MailServerOfTest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._is_tls = server.implicit
        self._login: tuple[str, str] | None = None
        self._sender = ""
        self._recipients: list[str] = []

    async def hold(self) -> None:
        await self._say("GREETING", "220 test ready")
        while line := (await self._reader.readuntil(b"\r\n")).decode().removesuffix("\r\n"):
            self._server.commands.append(line)
            verb, _, rest = line.partition(" ")
            match verb.upper():
                case "EHLO":
                    await self._say("EHLO", self._offers())
                case "STARTTLS":
                    await self._start_tls()
                case "AUTH":
                    _, user, password = base64.b64decode(rest.split()[-1]).decode().split("\0")
                    self._login = (user, password)
                    await self._say("AUTH", "235 welcome")
                case "MAIL":
                    self._sender, self._recipients = _address(rest), []
                    await self._say("MAIL", "250 ok")
                case "RCPT":
                    await self._take_recipient(_address(rest))
                case "DATA":
                    await self._say("DATA", "354 go on")
                    if not self._server.answers.get("DATA", "354").startswith("354"):
                        continue
                    await self._take_mail()
                    await self._say(".", "250 taken")
                case "QUIT":
                    await self._say("QUIT", "221 bye")
                    return
                case _:
                    await self._say(verb, "500 what?")

    async def _take_recipient(self, address: str) -> None:
        answers = self._server.answers
        answer = answers.get(f"RCPT {address}", answers.get("RCPT", "250 ok"))
        if answer.startswith("25"):
            self._recipients.append(address)
        await self._say(f"RCPT {address}", answer)

    def _offers(self) -> str:
        offers = ["test", "SIZE 1000000"]
        if self._server.tls is not None and not self._is_tls:
            offers.append("STARTTLS")
        *first, last = [*offers, "AUTH PLAIN"]
        return "".join(f"250-{each}\r\n" for each in first) + f"250 {last}"

    async def _start_tls(self) -> None:
        assert self._server.tls is not None
        self._writer.write(b"220 go on\r\n" + self._server.injected)
        await self._writer.drain()
        await self._writer.start_tls(self._server.tls)
        self._is_tls = True

    async def _take_mail(self) -> None:
        lines: list[bytes] = []
        while (line := await self._reader.readuntil(b"\r\n")) != b".\r\n":
            lines.append(line.removeprefix(b".") if line.startswith(b".") else line)
        mail = ReceivedMail(self._sender, tuple(self._recipients), b"".join(lines), self._is_tls, self._login)
        self._server.mails.append(mail)

    async def _say(self, to: str, usually: str) -> None:
        answer = self._server.answers.get(to, usually)
        if not answer:
            await asyncio.Event().wait()
        self._writer.write(answer.encode() + b"\r\n")
        await self._writer.drain()


def _address(rest: str) -> str:
    return rest.partition("<")[2].partition(">")[0]
