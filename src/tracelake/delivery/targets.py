"""Receivers: a message becomes a POST or a mail, and the answer becomes what is recorded about the try.

The message's id is the same for every try and for its record's retraction; ``Idempotency-Key`` and ``webhook-id``
differ between the two, so that a receiver which drops repeats doesn't drop the retraction. Secrets are read for
each try, so a rotated one needs no restart; they are in no error and no log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Protocol, assert_never

import msgspec

from tracelake.contracts.deliveries import (
    MAX_ERROR_CHARS,
    MAX_WAITING,
    DeliveryConfig,
    DeliveryMessage,
    TryVerdict,
)
from tracelake.delivery.addresses import Blocked, ReceiverEndpoint, read_url
from tracelake.delivery.connect import NotSent
from tracelake.delivery.http_post import HttpPoster, ReceiverAnswer, TryUnanswered
from tracelake.delivery.mail_text import mail_bytes
from tracelake.delivery.shown_words import one_line, shown_words
from tracelake.delivery.smtp import Mailer, MailRefused, MailServer
from tracelake.domain import standard_webhooks
from tracelake.domain.dag.model import EmailTarget, SlackTarget, WebhookTarget
from tracelake.domain.errors import TracelakeError
from tracelake.domain.template import describe, read_marked
from tracelake.settings import Secret
from tracelake.tokens.named_secrets import MissingSecret, SecretProvider

TRY_SECONDS = 15.0
MAX_RETRY_AFTER = 3600.0
_GONE = 410
_TOO_MANY = 429
_UNAVAILABLE = 503
#: A form's answer after its work is done; a server that has waited for the rest of what it took.
_DOUBTFUL = frozenset({302, 303, 408})
_SERVER_ERRORS = range(500, 600)
_MAX_SUBJECT = 200
_FOR_GOOD = 500


@dataclass(frozen=True, slots=True)
class TryResult:
    """``in_doubt``: the receiver may have it all the same. ``error`` of one that was sent: who didn't get it.
    ``hold_seconds``: it wants nothing before then."""

    result: TryVerdict
    in_doubt: bool = False
    status: int | None = None
    error: str | None = None
    hold_seconds: float = 0.0


class NotConfigured(Exception):
    """The delivery itself can't be used: no message is at fault, and none is tried."""


class Receiver(Protocol):
    def check(self) -> None:
        """Raises ``NotConfigured``."""
        ...

    async def send(self, message: DeliveryMessage) -> TryResult:
        """Raises ``NotConfigured`` before anything reached the receiver."""
        ...


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The connections that all receivers of a process share. ``seconds`` bounds each try."""

    poster: HttpPoster
    mailer: Mailer
    secrets: SecretProvider
    seconds: float = TRY_SECONDS


def message_key(message: DeliveryMessage) -> str:
    """The message's id for receivers that drop repeats."""
    made = "" if message.made_at == message.revision else f"-{message.made_at}"
    suffix = "_retracted" if message.kind == "retracted" else ""
    return f"{message.record_id}_{message.revision}{made}{suffix}"


def webhook_body(config: DeliveryConfig, message: DeliveryMessage) -> bytes:
    body: dict[str, object] = {
        "type": message.kind,
        "id": message.record_id,
        "revision": message.revision,
        "timestamp": message.row_at,
        "delivery": f"{config.dag_name}/{config.spec.name}",
        "dataset": config.spec.dataset,
        "data": msgspec.Raw(message.data.encode()),
    }
    if message.text is not None:
        body["text"] = shown_text(message, config.spec.dataset)
    return msgspec.json.encode(body)


def shown_text(message: DeliveryMessage, dataset: str, escape: Callable[[str], str] = str) -> str:
    """The text that people read. It is escaped here and not before: what waits may get another receiver, and a
    retraction may go to another one than its row."""
    if message.text is not None:
        text = read_marked(message.text, escape)
    else:
        # No template when the message was made.
        text = escape(describe(message.data, dataset))
    return f"[retracted] {text}" if message.kind == "retracted" else text


def escape_for_slack(text: str) -> str:
    """As Slack asks for: without these three, text can't become a link or call people."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class WebhookReceiver:
    def __init__(self, config: DeliveryConfig, target: WebhookTarget, parts: TargetParts) -> None:
        self._config = config
        self._target = target
        self._parts = parts

    def check(self) -> None:
        _url(self._parts, self._target.url_secret)
        self._keys()

    async def send(self, message: DeliveryMessage) -> TryResult:
        body = webhook_body(self._config, message)
        key = message_key(message)
        now = int(time.time())
        signed = {standard_webhooks.WEBHOOK_ID: key, standard_webhooks.WEBHOOK_TIMESTAMP: str(now)}
        if keys := self._keys():
            signed = standard_webhooks.signed_headers(keys, key, now, body)
        return await _post(self._parts, self._target.url_secret, {"Idempotency-Key": key, **signed}, body)

    def _keys(self) -> list[bytes]:
        if self._target.signing_secret is None:
            return []
        text = _secret(self._parts, self._target.signing_secret).reveal()
        try:
            # Several while the receiver learns a new one.
            keys = [standard_webhooks.decode_secret(each) for each in text.split()]
        except ValueError as error:
            raise NotConfigured(f"the secret {self._target.signing_secret} can't be used: {error}") from None
        if not keys:
            raise NotConfigured(f"the secret {self._target.signing_secret} is empty")
        return keys


class SlackReceiver:
    def __init__(self, config: DeliveryConfig, target: SlackTarget, parts: TargetParts) -> None:
        self._config = config
        self._target = target
        self._parts = parts

    def check(self) -> None:
        _url(self._parts, self._target.url_secret)

    async def send(self, message: DeliveryMessage) -> TryResult:
        text = shown_text(message, self._config.spec.dataset, escape_for_slack)
        body = msgspec.json.encode({"text": text})
        return await _post(
            self._parts, self._target.url_secret, {"Idempotency-Key": message_key(message)}, body
        )


class EmailReceiver:
    """A recipient that is refused keeps the mail from no other. One that is refused for good is named in the try's
    error; one that is refused for now is tried again alone, by this process."""

    def __init__(self, config: DeliveryConfig, target: EmailTarget, parts: TargetParts) -> None:
        self._config = config
        self._target = target
        self._parts = parts
        self._settled: dict[int, dict[str, str | None]] = {}
        """Of mails that some have: the recipients that aren't tried again, with a refusal or None."""

    def check(self) -> None:
        self._server()

    async def send(self, message: DeliveryMessage) -> TryResult:
        mail = self._mail(message)
        settled = self._settled.get(message.message_id, {})
        asked = [each for each in self._target.recipients if each not in settled]
        try:
            refused = await self._parts.mailer.send(
                self._server(), self._target.sender, asked, mail, self._parts.seconds
            )
        except MailRefused as error:
            return TryResult("failed", status=error.code, error=_cut(str(error)))
        except Blocked as error:
            raise _unusable(self._target.smtp_secret, error) from None
        except NotSent as error:
            return TryResult("failed", error=_cut(str(error)))
        except TryUnanswered as error:
            return TryResult("failed", in_doubt=True, error=_cut(str(error)))
        answers = {each: refused.get(each) for each in asked}
        return self._settle(message.message_id, settled, answers)

    def _settle(
        self, message_id: int, settled: dict[str, str | None], answers: Mapping[str, MailRefused | None]
    ) -> TryResult:
        refused = [error for error in answers.values() if error is not None]
        if not settled and len(refused) == len(answers):
            return TryResult("failed", status=refused[0].code, error=_cut(str(refused[0])))
        later = {
            each: error for each, error in answers.items() if error is not None and error.code < _FOR_GOOD
        }
        for each, error in answers.items():
            if each not in later:
                settled[each] = None if error is None else f"{each}: {error}"
        if not later:
            self._settled.pop(message_id, None)
            words = "; ".join(error for error in settled.values() if error is not None)
            return TryResult("sent", status=250, error=_cut(words) or None)
        if len(self._settled) >= MAX_WAITING:
            # Given up, mostly: all its recipients would get it with a replay.
            del self._settled[next(iter(self._settled))]
        self._settled[message_id] = settled
        words = "; ".join(f"{each}: {error}" for each, error in later.items())
        return TryResult("failed", in_doubt=True, status=next(iter(later.values())).code, error=_cut(words))

    def _server(self) -> MailServer:
        name = self._target.smtp_secret
        url = _secret(self._parts, name).reveal()
        try:
            return MailServer.parse(url, self._parts.poster.allowance)
        except Blocked as error:
            raise _unusable(name, error) from None

    def _mail(self, message: DeliveryMessage) -> bytes:
        text = shown_text(message, self._config.spec.dataset)
        first = one_line(text.partition("\n")[0]).strip()[:_MAX_SUBJECT]
        domain = self._target.sender.rpartition("@")[2]
        headers = {
            "From": self._target.sender,
            "To": ",\r\n ".join(self._target.recipients),
            "Date": format_datetime(datetime.now(UTC)),
            "Message-ID": f"<{message_key(message)}@{domain}>",
            "Auto-Submitted": "auto-generated",
        }
        if message.kind == "retracted":
            headers["X-Tracelake-Retracts"] = message.record_id
        subject = first or f"{self._config.spec.dataset}: {message.kind}"
        return mail_bytes(headers, subject, f"{text}\n\n{self._config.dag_name}/{self._config.spec.name}\n")


def open_target(config: DeliveryConfig, parts: TargetParts) -> Receiver:
    match config.spec.to:
        case WebhookTarget() as target:
            return WebhookReceiver(config, target, parts)
        case SlackTarget() as target:
            return SlackReceiver(config, target, parts)
        case EmailTarget() as target:
            return EmailReceiver(config, target, parts)
        case other:
            assert_never(other)


async def _post(parts: TargetParts, url_secret: str, headers: Mapping[str, str], body: bytes) -> TryResult:
    endpoint, path = _url(parts, url_secret)
    address = f"{endpoint.host}{path}"
    sent = {"Content-Type": "application/json", "User-Agent": "tracelake", "Accept": "*/*", **headers}
    try:
        return judge_answer(await parts.poster.post(endpoint, path, sent, body, parts.seconds), address)
    except Blocked as error:
        raise _unusable(url_secret, error) from None
    except NotSent as error:
        return TryResult("failed", error=_cut(str(error)))
    except TryUnanswered as error:
        return TryResult("failed", in_doubt=True, error=_cut(str(error)))


def judge_answer(answer: ReceiverAnswer, address: str = "/") -> TryResult:
    """``address`` is a secret from its host on: an answer that may repeat a part of it isn't shown."""
    if 200 <= answer.status < 300:
        return TryResult("sent", status=answer.status)
    if 300 <= answer.status < 400:
        error = "it redirects, and no redirect is followed"
        return TryResult("failed", in_doubt=_may_have_it(answer), status=answer.status, error=error)
    words = shown_words(answer.body.decode("utf-8", "replace"), address)
    error = _cut(f"it answered {answer.status}{f': {words}' if words else ''}")
    if answer.status == _GONE:
        return TryResult("gone", status=answer.status, error=error)
    hold = 0.0
    if answer.status in (_TOO_MANY, _UNAVAILABLE):
        hold = retry_after(answer.headers.get("retry-after", ""), datetime.now(UTC))
    return TryResult(
        "failed", in_doubt=_may_have_it(answer), status=answer.status, error=error, hold_seconds=hold
    )


def _may_have_it(answer: ReceiverAnswer) -> bool:
    # An application may fail after its work was done, and a proxy answers for one that has done it.
    return answer.status in _DOUBTFUL or answer.status in _SERVER_ERRORS


def retry_after(text: str, now: datetime) -> float:
    """Seconds, from either form of the header; 0 without a usable one. An hour at most: then it is asked again."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER)
    try:
        at = parsedate_to_datetime(text)
    except Exception:
        # The library promises ValueError, and raises others too: years and zones may have any number of digits.
        return 0.0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(max((at - now).total_seconds(), 0.0), MAX_RETRY_AFTER)


def _url(parts: TargetParts, name: str) -> tuple[ReceiverEndpoint, str]:
    url = _secret(parts, name).reveal().strip()
    try:
        return read_url(url, ("https", "http"), parts.poster.allowance)
    except Blocked as error:
        raise _unusable(name, error) from None


def _unusable(secret: str, error: Blocked) -> NotConfigured:
    return NotConfigured(f"the secret {secret} can't be used: {error}")


def _secret(parts: TargetParts, name: str) -> Secret:
    try:
        return parts.secrets.resolve([name])[name]
    except MissingSecret:
        raise NotConfigured(
            f"the delivery process has no secret {name}: set TRACELAKE_SECRET_{name.upper()} for it, or add it to "
            "TRACELAKE_SECRETS_FILE"
        ) from None
    except TracelakeError as error:
        # The file is being written, mostly. What is under way goes on, and what waits isn't tried.
        raise NotConfigured(f"the secrets of the delivery process can't be read: {error.message}") from None


def _cut(text: str) -> str:
    return text[:MAX_ERROR_CHARS]
