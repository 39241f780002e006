"""One mail over SMTP: to an address that was judged, over TLS, with a deadline and a bound on what is read.

The library's client resolves names by itself and bounds each wait, not the whole. This is the part of SMTP
that submitting one mail needs: TLS from the first byte (``smtps``) or STARTTLS, a login, one sender, its
recipients, the mail. Without TLS nothing is sent, unless the installation allows the host in plain text.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tracelake.delivery.addresses import Allowance, Blocked, ReceiverAddresses, ReceiverEndpoint, read_url
from tracelake.delivery.connect import NotSent, connect, tls_failed
from tracelake.delivery.http_post import TryUnanswered
from tracelake.delivery.shown_words import shown_words
from tracelake.settings import Secret

MAX_LINE = 2048
MAX_LINES = 100
_HELLO = "tracelake"
_REFUSALS = 400
_CLOSING = 421
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class MailServer:
    endpoint: ReceiverEndpoint
    user: str
    password: Secret

    @classmethod
    def parse(cls, url: str, allowance: Allowance) -> MailServer:
        """``smtps://user:password@host`` or ``smtp://…`` (STARTTLS). Raises ``Blocked`` without the address."""
        endpoint, _ = read_url(url, ("smtps", "smtp"), allowance)
        parts = urlsplit(url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if "\0" in user + password:
            raise Blocked("the login holds a NUL")
        return cls(endpoint, user, Secret(password))


class MailRefused(Exception):
    """The server's code, and what it answered: its own words, cut, where those are shown."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the mail server answered {code}: {text}")
        self.code = code


class Mailer:
    def __init__(self, addresses: ReceiverAddresses, tls: ssl.SSLContext | None = None) -> None:
        self._addresses = addresses
        self._tls = tls or ssl.create_default_context()

    async def send(
        self, server: MailServer, sender: str, recipients: Sequence[str], mail: bytes, seconds: float
    ) -> dict[str, MailRefused]:
        """The recipients that were refused; the others have the mail. Raises ``Blocked``, ``NotSent``,
        ``MailRefused`` or ``TryUnanswered``: then no one has it, but for the last."""
        session = _Session(server, self._tls)
        try:
            async with asyncio.timeout(seconds) as limit:
                await session.open(self._addresses, limit.when())
                await session.greet()
                await session.log_in()
                return await session.submit(sender, recipients, mail)
        except TimeoutError:
            raise session.lost(f"no answer within {seconds:g} s") from None
        except ssl.SSLError as error:
            raise session.lost(tls_failed(error)) from None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise session.lost(f"the connection failed: {type(error).__name__}") from None
        finally:
            session.close()


class _Session:
    def __init__(self, server: MailServer, tls: ssl.SSLContext) -> None:
        self._server = server
        self._tls = tls
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._submitted = False
        self._allows_plain = False

    def lost(self, why: str) -> Exception:
        # Once the mail's last line was written, the server may have taken it.
        return TryUnanswered(why) if self._submitted else NotSent(why)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def open(self, addresses: ReceiverAddresses, deadline: float | None) -> None:
        endpoint = self._server.endpoint

        async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(
                address,
                endpoint.port,
                limit=MAX_LINE,
                ssl=self._tls if endpoint.is_tls else None,
                server_hostname=endpoint.host if endpoint.is_tls else None,
            )

        self._reader, self._writer = await connect(addresses, endpoint, deadline, opened)
        self._allows_plain = addresses.allowance.covers(endpoint.host, endpoint.port)

    async def greet(self) -> None:
        await self._expect(220)
        offers = await self._ask(f"EHLO {_HELLO}", 250)
        if not self._server.endpoint.is_tls and any(each.upper() == "STARTTLS" for each in offers):
            await self._ask("STARTTLS", 220)
            assert self._writer is not None
            await self._refuse_early_answers()
            await self._writer.start_tls(self._tls, server_hostname=self._server.endpoint.host)
            await self._ask(f"EHLO {_HELLO}", 250)
        elif not self._server.endpoint.is_tls and not self._allows_plain:
            raise NotSent("the mail server offers no TLS")

    async def _refuse_early_answers(self) -> None:
        """Bytes that came before the handshake would be taken for answers that TLS protects."""
        assert self._reader is not None
        try:
            async with asyncio.timeout(0):
                await self._reader.read(1)
        except TimeoutError:
            return
        raise NotSent("the server sent more than STARTTLS allows")

    async def log_in(self) -> None:
        if self._server.user:
            login = f"\0{self._server.user}\0{self._server.password.reveal()}".encode()
            try:
                await self._ask(f"AUTH PLAIN {base64.b64encode(login).decode()}", 235)
            except MailRefused as error:
                # Some servers repeat the command that they refuse.
                raise MailRefused(error.code, "it refuses the login") from None

    async def submit(self, sender: str, recipients: Sequence[str], mail: bytes) -> dict[str, MailRefused]:
        await self._ask(f"MAIL FROM:<{sender}>", 250)
        refused: dict[str, MailRefused] = {}
        for recipient in recipients:
            try:
                await self._ask(f"RCPT TO:<{recipient}>", 250, 251)
            except MailRefused as error:
                if error.code == _CLOSING:
                    raise
                refused[recipient] = error
        if refused.keys() >= set(recipients):
            return refused
        await self._ask("DATA", 354)
        assert self._writer is not None
        # A line that is one dot would end the mail early, and some servers take a bare CR or LF for a line's end.
        lines = _LINE_END.split(mail)
        stuffed = b"\r\n".join(b"." + line if line.startswith(b".") else line for line in lines)
        self._submitted = True
        self._writer.write(stuffed.removesuffix(b"\r\n") + b"\r\n.\r\n")
        await self._expect(250)
        self._submitted = False
        self._writer.write(b"QUIT\r\n")
        return refused

    async def _ask(self, line: str, *wanted: int) -> list[str]:
        assert self._writer is not None
        if not line.isprintable() or not line.isascii():
            raise ValueError("a command can't hold control characters")
        self._writer.write(f"{line}\r\n".encode())
        return await self._expect(*wanted)

    async def _expect(self, *wanted: int) -> list[str]:
        assert self._reader is not None
        lines: list[str] = []
        while len(lines) < MAX_LINES:
            # A longer line than the reader's limit is a ValueError.
            raw = await self._reader.readuntil(b"\n")
            line = raw.decode("ascii", "replace").rstrip("\r\n")
            code, more, text = line[:3], line[3:4], line[4:]
            if not code.isdecimal():
                raise ValueError("the answer isn't SMTP")
            lines.append(text.strip())
            if more != "-":
                if int(code) not in wanted:
                    # Only a refusal says that it didn't take the mail.
                    if self._submitted and int(code) < _REFUSALS:
                        raise TryUnanswered(f"the mail server answered {code} to the mail")
                    self._submitted = False
                    login = (self._server.user, self._server.password.reveal())
                    raise MailRefused(int(code), shown_words(text, *login))
                return lines
        raise ValueError("the answer has too many lines")
