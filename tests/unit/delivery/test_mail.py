"""Mail to a real server: its envelope, its login, and nothing of a row that becomes a header or a command."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from email import message_from_bytes
from email.header import decode_header, make_header
from uuid import UUID

import pytest

from tests.support.certificates import Authority
from tests.support.mail_server import MailServerOfTest
from tracelake.contracts.deliveries import DeliveryConfig, DeliveryMessage, MessageKind
from tracelake.delivery.addresses import Allowance, Blocked, ReceiverAddresses, ReceiverEndpoint
from tracelake.delivery.connect import NotSent
from tracelake.delivery.http_post import HttpPoster
from tracelake.delivery.smtp import Mailer, MailServer
from tracelake.delivery.targets import EmailReceiver, NotConfigured, TargetParts, TryResult
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import DeliverySpec, EmailTarget
from tracelake.tokens.named_secrets import SecretProvider

HOST = "mail.example"
SENDER = "alerts@sender.example"
TO = ("ops@receiver.example", "boss@receiver.example")
HOSTILE = "\r\nBcc: victim@inner.example\r\n\r\nx\r\n.\r\nMAIL FROM:<evil@inner.example>\r\n"
ALLOWED = Allowance.parse(HOST)
_TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def _loopback(_host: str, _port: int) -> list[str]:
    return ["127.0.0.1"]


def mailbox(
    url: str,
    *,
    authority: Authority | None = None,
    sender: str = SENDER,
    to: Sequence[str] = TO,
    seconds: float = 30,
    allowance: Allowance = ALLOWED,
) -> EmailReceiver:
    addresses = ReceiverAddresses(allowance, _loopback)
    # The system's authorities take a while to load, and none of them is needed here.
    tls = authority.trusted() if authority else _TRUSTS_NOBODY
    mailer = Mailer(addresses, tls)
    secrets = SecretProvider({"TRACELAKE_SECRET_MAIL": url}, None)
    target = EmailTarget("MAIL", sender, tuple(to))
    spec = DeliverySpec(name="whales", dataset="alert_events", to=target)
    config = DeliveryConfig(UUID(int=1), "alerts", UUID(int=2), "", spec, BufferSchema((), ()))
    return EmailReceiver(config, target, TargetParts(HttpPoster(addresses, tls), mailer, secrets, seconds))


def message(text: str, kind: MessageKind = "row") -> DeliveryMessage:
    return DeliveryMessage(7, "rec_1", 3, 3, kind, "k", "{}", text, datetime(2026, 1, 1, tzinfo=UTC), 0, 0)


async def sent(text: str, server: MailServerOfTest, kind: MessageKind = "row") -> TryResult:
    return await mailbox(f"smtp://{HOST}:{server.port}").send(message(text, kind))


async def test_a_mail_arrives_with_its_subject_and_the_same_id_at_each_try() -> None:
    async with MailServerOfTest() as server:
        for _ in range(2):
            assert await sent("critical: größer\nsecond line\n.\n..dots", server) == TryResult(
                "sent", status=250
            )
        await sent("critical: größer", server, "retracted")
    first, again, back = server.mails
    assert (first.sender, first.recipients, first.was_tls) == (SENDER, TO, False)
    assert (first.mail["Subject"], first.mail["From"]) == ("critical: größer", SENDER)
    assert first.text.splitlines()[1:4] == ["second line", ".", "..dots"]
    assert first.mail["Message-ID"] == again.mail["Message-ID"] != back.mail["Message-ID"]
    assert back.mail["Subject"] == "[retracted] critical: größer"
    assert back.mail["X-Tracelake-Retracts"] == "rec_1"


@pytest.mark.parametrize("implicit", [True, False], ids=["smtps", "starttls"])
async def test_the_login_goes_over_tls_alone(authority: Authority, implicit: bool) -> None:
    async with MailServerOfTest(authority.serving(HOST), implicit=implicit) as server:
        scheme = "smtps" if implicit else "smtp"
        url = f"{scheme}://me%40sender.example:p%3Aw%2Fd@{HOST}:{server.port}"
        assert (await mailbox(url, authority=authority).send(message("hi"))).result == "sent"
    [mail] = server.mails
    assert (mail.was_tls, mail.login) == (True, ("me@sender.example", "p:w/d"))
    if not implicit:
        # Nothing that was said before the handshake is believed after it.
        assert [each.split()[0] for each in server.commands][:4] == ["EHLO", "STARTTLS", "EHLO", "AUTH"]


class Unjudged(ReceiverAddresses):
    """A host that isn't allowed and has a public address, as far as the mailer can tell."""

    async def of(self, endpoint: ReceiverEndpoint) -> list[str]:
        return ["127.0.0.1"]


async def test_without_tls_nothing_is_sent_unless_the_host_is_allowed() -> None:
    async with MailServerOfTest() as server:
        url = f"smtp://user:secret@{HOST}:{server.port}"
        mailer = Mailer(Unjudged(Allowance()), _TRUSTS_NOBODY)
        with pytest.raises(NotSent, match="offers no TLS"):
            await mailer.send(MailServer.parse(url, Allowance()), SENDER, TO, b"x\r\n", 30)
        assert [each.split()[0] for each in server.commands] == ["EHLO"]
        assert (await mailbox(url).send(message("hi"))).result == "sent"
    assert server.mails[0].login == ("user", "secret")


async def test_a_mail_server_inside_is_refused_unless_it_is_allowed() -> None:
    async with MailServerOfTest() as server:
        target = MailServer.parse(f"smtps://127.0.0.1:{server.port}", Allowance())
        with pytest.raises(Blocked):
            await Mailer(ReceiverAddresses(Allowance()), _TRUSTS_NOBODY).send(
                target, SENDER, TO, b"x\r\n", 30
            )
    assert server.commands == []


@pytest.mark.parametrize(
    "breaks",
    [
        "\r\n",
        "\n",
        "\r",
        "\v",
        "\f",
        "\x1c",
        "\x1d",
        "\x1e",
        "\x85",
        "\u2028",
        "\u2029",
        "\0",
        "\r\n ",
        "\n\t",
    ],
)
async def test_no_line_break_in_a_row_becomes_a_header(breaks: str) -> None:
    async with MailServerOfTest() as server:
        assert (await sent(f"big{breaks}Bcc: victim@inner.example", server)).result == "sent"
    [mail] = server.mails
    assert (mail.recipients, mail.mail["Bcc"], len(mail.mail.defects)) == (TO, None, 0)
    assert mail.mail["Subject"] in ("big", "big Bcc: victim@inner.example")


async def test_a_row_that_speaks_smtp_is_content() -> None:
    async with MailServerOfTest() as server:
        for text in (HOSTILE, f"subject{HOSTILE}", f"ä{HOSTILE}", "x" * 5000 + HOSTILE):
            assert (await sent(text, server)).result == "sent"
    assert len(server.mails) == 4
    assert {each.sender for each in server.mails} == {SENDER}
    for each in server.mails:
        assert each.mail["Bcc"] is None
        assert "MAIL FROM:<evil@inner.example>" in each.text
        assert max(len(line) for line in each.raw.split(b"\r\n")) <= 998


SMUGGLED = "Bcc:_victim@inner.example=0d=0aReply-To:_evil@inner.example"


@pytest.mark.parametrize(
    "word",
    [
        f"=?utf-8?q?=0d=0a{SMUGGLED}?=",
        f"=?utf-8?q?=0a{SMUGGLED}?=",
        "=?utf-8?q?=0d=0a=0d=0aFake_body?=",
        "=?utf-8?q?=0a.=0d=0aMAIL_FROM:<evil@inner.example>=0d=0aDATA?=",
        "=?utf-8?b?DQpCY2M6IHZpY3RpbUBpbm5lci5leGFtcGxl?=",
        "=?iso-8859-1?q?=0dBcc:_x?= =?utf-8?q?=0aBcc:_x?=",
        "größer =?utf-8?q?=0d=0aBcc:_x?=",
    ],
)
async def test_an_encoded_word_in_a_row_stays_the_text_that_it_is(word: str) -> None:
    async with MailServerOfTest() as server:
        assert (await sent(f" {word} x\nthe body {word}", server)).result == "sent"
    [mail] = server.mails
    head = mail.raw.partition(b"\r\n\r\n")[0]
    names = [line.partition(b":")[0] for line in head.split(b"\r\n") if not line.startswith(b" ")]
    assert sorted(names) == [
        *(
            b"Auto-Submitted",
            b"Content-Transfer-Encoding",
            b"Content-Type",
            b"Date",
            b"From",
            b"MIME-Version",
        ),
        *(b"Message-ID", b"Subject", b"To"),
    ]
    assert b"\r" not in mail.raw.replace(b"\r\n", b"")
    assert b"\n" not in mail.raw.replace(b"\r\n", b"")
    [subject] = [line for line in message_from_bytes(mail.raw).raw_items() if line[0] == "Subject"]
    assert str(make_header(decode_header(str(subject[1])))) == f"{word} x"
    assert (mail.recipients, [each.split()[0] for each in server.commands if each != "QUIT"]) == (
        TO,
        ["EHLO", "MAIL", "RCPT", "RCPT", "DATA"],
    )
    assert f"the body {word}" in mail.text


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
async def test_whatever_ends_a_line_a_dot_alone_ends_no_mail(end: bytes) -> None:
    async with MailServerOfTest() as server:
        target = MailServer.parse(f"smtp://{HOST}:{server.port}", Allowance.parse(HOST))
        mailer = Mailer(ReceiverAddresses(Allowance.parse(HOST), _loopback), _TRUSTS_NOBODY)
        mail = end.join([b"Subject: x", b"", b"a", b".", b"MAIL FROM:<evil@inner.example>", b"DATA", b""])
        await mailer.send(target, SENDER, TO, mail, 30)
    assert [each.raw.split(b"\r\n")[2:6] for each in server.mails] == [
        [b"a", b".", b"MAIL FROM:<evil@inner.example>", b"DATA"]
    ]


@pytest.mark.parametrize(
    ("sender", "to"),
    [
        ("a@b.example>\r\nRCPT TO:<victim@inner.example", TO),
        (SENDER, ("ops@receiver.example\r\nDATA",)),
        (SENDER, ("ops@receiver.example\nBcc: victim@inner.example",)),
    ],
)
async def test_an_address_with_a_line_break_never_reaches_a_server(sender: str, to: Sequence[str]) -> None:
    """A DAG file with one is refused; this is the wall behind it."""
    async with MailServerOfTest() as server:
        receiver = mailbox(f"smtp://{HOST}:{server.port}", sender=sender, to=to)
        with pytest.raises(ValueError, match=r"linefeed|control"):
            await receiver.send(message("hi"))
    assert (server.commands, server.mails) == ([], [])


async def test_a_mail_server_that_may_not_be_reached_is_no_try_of_the_message() -> None:
    for url in (f"smtps://{HOST}", f"smtp://{HOST}"):
        receiver = mailbox(url, allowance=Allowance())
        receiver.check()
        with pytest.raises(NotConfigured, match=r"the secret MAIL can't be used.*TRACELAKE_DELIVERY_ALLOW"):
            await receiver.send(message("hi"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://mail.example", "must begin with smtps:// or smtp://"),
        ("smtp://user:pw%0d%0aRSET@mail.example\r\n", "visible ASCII"),
        ("smtps://us%00er:pw@mail.example", "NUL"),
        ("smtps://[::1", "isn't a URL"),
        ("smtps://", "must begin"),
        ("", "visible ASCII"),
    ],
)
def test_a_secret_that_is_no_mail_server_is_named_and_never_quoted(url: str, why: str) -> None:
    with pytest.raises(NotConfigured, match=why) as refused:
        mailbox(url).check()
    assert "MAIL" in str(refused.value)
    assert "pw" not in str(refused.value)


async def test_a_line_break_in_a_password_is_encoded_with_it(authority: Authority) -> None:
    async with MailServerOfTest(authority.serving(HOST)) as server:
        url = f"smtp://me:pw%0d%0aRSET@{HOST}:{server.port}"
        assert (await mailbox(url, authority=authority).send(message("hi"))).result == "sent"
    assert (server.mails[0].login, "RSET" in server.commands) == (("me", "pw\r\nRSET"), False)


async def test_a_login_that_is_refused_is_shown_with_its_code_alone() -> None:
    login = base64.b64encode(b"\0me\0hidden-pw").decode()
    for answer in (f'500 5.5.1 Command unrecognized: "AUTH PLAIN {login}"', "535-5.7.8 me\r\n535 hidden-pw"):
        async with MailServerOfTest(answers={"AUTH": answer}) as server:
            url = f"smtp://me:hidden-pw@{HOST}:{server.port}"
            result = await mailbox(url).send(message("hi"))
        code = int(answer[:3])
        assert result == TryResult(
            "failed", status=code, error=f"the mail server answered {code}: it refuses the login"
        )


async def test_a_refusal_that_repeats_the_login_is_not_shown() -> None:
    async with MailServerOfTest(answers={"MAIL": "553 5.7.1 sender not owned by ME-9"}) as server:
        result = await mailbox(f"smtp://me-9:hidden-pw@{HOST}:{server.port}").send(message("hi"))
    assert (result.status, "ME-9" in (result.error or "")) == (553, False)


OPS, BOSS = TO


async def test_a_recipient_that_is_refused_keeps_the_mail_from_no_other() -> None:
    async with MailServerOfTest(answers={f"RCPT {OPS}": "550 no such user"}) as server:
        result = await mailbox(f"smtp://{HOST}:{server.port}").send(message("hi"))
    assert [each.recipients for each in server.mails] == [(BOSS,)]
    assert (result.result, result.in_doubt) == ("sent", False)
    assert result.error == f"{OPS}: the mail server answered 550: no such user"


async def test_a_recipient_that_is_refused_for_now_is_tried_again_alone() -> None:
    answers = {f"RCPT {BOSS}": "450 try later"}
    async with MailServerOfTest(answers=answers) as server:
        receiver = mailbox(f"smtp://{HOST}:{server.port}")
        for _ in range(2):
            result = await receiver.send(message("hi"))
            # Some have it: a retraction has to follow.
            assert (result.result, result.status, result.in_doubt) == ("failed", 450, True)
            assert result.error == f"{BOSS}: the mail server answered 450: try later"
        answers.clear()
        assert await receiver.send(message("hi")) == TryResult("sent", status=250)
    assert [each.recipients for each in server.mails] == [(OPS,), (BOSS,)]


async def test_a_recipient_that_is_refused_for_good_at_last_is_named() -> None:
    answers = {f"RCPT {BOSS}": "450 try later"}
    async with MailServerOfTest(answers=answers) as server:
        receiver = mailbox(f"smtp://{HOST}:{server.port}")
        assert (await receiver.send(message("hi"))).result == "failed"
        answers[f"RCPT {BOSS}"] = "550 gone"
        result = await receiver.send(message("hi"))
    assert (result.result, result.error) == ("sent", f"{BOSS}: the mail server answered 550: gone")
    assert [each.recipients for each in server.mails] == [(OPS,)]


async def test_a_server_that_closes_among_the_recipients_has_nothing() -> None:
    async with MailServerOfTest(answers={f"RCPT {BOSS}": "421 closing"}) as server:
        result = await mailbox(f"smtp://{HOST}:{server.port}").send(message("hi"))
    assert (result.result, result.status, result.in_doubt, server.mails) == ("failed", 421, False, [])


async def test_bytes_before_the_handshake_end_the_try(authority: Authority) -> None:
    tls = authority.serving(HOST)
    async with MailServerOfTest(tls, injected=b"250-test\r\n250 AUTH PLAIN\r\n") as server:
        receiver = mailbox(f"smtp://user:secret@{HOST}:{server.port}", authority=authority)
        result = await receiver.send(message("hi"))
    assert (result.result, result.in_doubt) == ("failed", False)
    assert "more than STARTTLS allows" in (result.error or "")
    assert server.mails == []


@pytest.mark.parametrize(
    ("answers", "status", "in_doubt", "words"),
    [
        ({"GREETING": "554 go away"}, 554, False, "go away"),
        ({"GREETING": "HTTP/1.1 400 Bad Request"}, None, False, "ValueError"),
        ({"GREETING": "220 " + "x" * 5000}, None, False, "failed"),
        ({"EHLO": "250-more\r\n" * 200 + "250 end"}, None, False, "ValueError"),
        ({"RCPT": "550 no such user"}, 550, False, "no such user"),
        ({"RCPT": "550 \x1b[31mred"}, 550, False, "[31mred"),
        ({"DATA": "452 full"}, 452, False, "full"),
        ({".": "554 spam"}, 554, False, "spam"),
        # It may have taken the mail.
        ({".": ""}, None, True, "no answer within"),
        ({".": "251 taken on"}, None, True, "answered 251"),
        ({"MAIL": ""}, None, False, "no answer within"),
    ],
)
async def test_what_a_server_refuses_is_failed_and_in_doubt_only_when_it_may_have_the_mail(
    answers: dict[str, str], status: int | None, in_doubt: bool, words: str
) -> None:
    async with MailServerOfTest(answers=answers) as server:
        # Only answers that never come wait for this long.
        seconds = 0.5 if "" in answers.values() else 30
        result = await mailbox(f"smtp://{HOST}:{server.port}", seconds=seconds).send(message("hi"))
    assert (result.result, result.status, result.in_doubt) == ("failed", status, in_doubt)
    assert words in (result.error or "")
    assert (result.error or "").isprintable()
