"""A message as the bytes of a mail, each line written here: nothing of a row is ever read as a header.

The library's message objects read a header's value before they write it, and what an encoded word in it stands for
(``=?utf-8?q?=0d=0aBcc:…?=``) comes out as it is. So the subject is encoded here, the body is quoted-printable, and
the finished bytes are checked: the expected headers and no others, and no line end but CRLF.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping

_MAX_LINE = 900
#: Of UTF-8 in one encoded word, which may have 75 characters with all around it.
_WORD_BYTES = 45
_BREAK = re.compile(r"\r\n?|\n")
_BARE = re.compile(rb"\r(?!\n)|(?<!\r)\n")
_HEADER = re.compile(rb"([A-Za-z-]+): [\x20-\x7e]*(?:\r\n [\x20-\x7e]*)*\Z")
_PLAIN = re.compile(r"[\x20-\x7e]{0,200}\Z")


def mail_bytes(headers: Mapping[str, str], subject: str, text: str) -> bytes:
    """``headers`` hold nothing of a row. Raises ``ValueError`` for one that can't be written as it is."""
    fields = {
        **headers,
        "Subject": _encoded(subject),
        "MIME-Version": "1.0",
        "Content-Type": 'text/plain; charset="utf-8"',
        "Content-Transfer-Encoding": "quoted-printable",
    }
    head = "\r\n".join(f"{name}: {value}" for name, value in fields.items())
    body = binascii.b2a_qp(_BREAK.sub("\n", text).encode("utf-8", "replace"))
    mail = head.encode("ascii") + b"\r\n\r\n" + body.replace(b"\n", b"\r\n")
    _check(mail, tuple(fields))
    return mail


def _encoded(subject: str) -> str:
    # "=?" would be read as the beginning of an encoded word.
    if _PLAIN.match(subject) and "=?" not in subject:
        return subject
    words = (base64.b64encode(each).decode() for each in _pieces(subject))
    return "\r\n ".join(f"=?utf-8?b?{word}?=" for word in words)


def _pieces(text: str) -> Iterator[bytes]:
    """A character is never cut in two: each word is decoded by itself."""
    piece = b""
    for character in text:
        encoded = character.encode("utf-8", "replace")
        if len(piece) + len(encoded) > _WORD_BYTES:
            yield piece
            piece = b""
        piece += encoded
    yield piece


def _check(mail: bytes, names: tuple[str, ...]) -> None:
    head, _, _ = mail.partition(b"\r\n\r\n")
    fields = re.split(rb"\r\n(?! )", head)
    found = [_HEADER.match(field) for field in fields]
    if [match[1].decode() if match else "" for match in found] != list(names):
        raise ValueError("a header of the mail holds a control character, or ends too early")
    if _BARE.search(mail) or max(map(len, mail.split(b"\r\n"))) > _MAX_LINE:
        raise ValueError("the mail has a bare CR or LF, or a line that is too long")
