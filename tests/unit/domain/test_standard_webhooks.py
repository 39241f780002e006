"""Signatures of webhooks: the specification's own vector, rotation, and everything that must not verify."""

from __future__ import annotations

import pytest

from tracelake.domain.standard_webhooks import (
    WEBHOOK_ID,
    WEBHOOK_SIGNATURE,
    WEBHOOK_TIMESTAMP,
    SignatureVerdict,
    decode_secret,
    encode_secret,
    sign,
    signed_headers,
    verify,
)

# The vector that the specification's reference libraries are tested with.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
TIME = 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
KEY = decode_secret(SECRET)
OTHER = bytes(range(32))


def judge(**changed: object) -> SignatureVerdict:
    given = {"message_id": ID, "timestamp": str(TIME), "signature": SIGNATURE, "body": BODY, "now": TIME}
    keys = changed.pop("keys", [KEY])
    return verify(keys, **{**given, **changed})  # type: ignore[arg-type]


def test_the_specifications_vector_is_reproduced_and_verifies() -> None:
    assert sign(KEY, ID, TIME, BODY) == SIGNATURE
    assert judge() is SignatureVerdict.VALID
    assert decode_secret(SECRET.removeprefix("whsec_")) == KEY
    assert decode_secret(encode_secret(KEY)) == KEY


def test_a_key_is_rotated_from_either_side_without_a_gap() -> None:
    headers = signed_headers([OTHER, KEY], ID, TIME, BODY)
    assert (headers[WEBHOOK_ID], headers[WEBHOOK_TIMESTAMP]) == (ID, str(TIME))
    assert judge(signature=headers[WEBHOOK_SIGNATURE]) is SignatureVerdict.VALID
    assert judge(keys=[OTHER, KEY]) is SignatureVerdict.VALID


@pytest.mark.parametrize(
    "changed",
    [
        {"body": BODY + b" "},
        {"message_id": f"{ID}x"},
        {"timestamp": str(TIME + 1)},
        {"keys": [OTHER]},
        {"keys": []},
        {"signature": SIGNATURE.replace("v1,", "v1a,")},
        {"signature": "v1,"},
        {"signature": "v1,é"},
        {"signature": SIGNATURE.lower()},
    ],
)
def test_any_change_makes_a_signature_wrong(changed: dict[str, object]) -> None:
    assert judge(**changed) is SignatureVerdict.WRONG_SIGNATURE


@pytest.mark.parametrize(
    "changed",
    [
        {"message_id": ""},
        {"message_id": f"{ID}.x"},
        {"timestamp": ""},
        {"timestamp": "-1"},
        {"timestamp": "1e9"},
        {"timestamp": "١٦١٤٢٦٥٣٣٠"},
        {"timestamp": "9" * 13},
        {"signature": ""},
        {"signature": "v1,x " * 17},
    ],
)
def test_headers_that_are_none_of_the_scheme_are_malformed(changed: dict[str, object]) -> None:
    assert judge(**changed) is SignatureVerdict.MALFORMED


def test_a_signature_holds_for_one_id_time_and_body_only() -> None:
    body = f"{TIME + 1}.rest".encode()
    signature = sign(KEY, ID, TIME, body)
    assert judge(signature=signature, body=body) is SignatureVerdict.VALID
    shifted = {"message_id": f"{ID}.{TIME}", "timestamp": str(TIME + 1), "body": b"rest"}
    assert judge(signature=signature, **shifted) is SignatureVerdict.MALFORMED
    with pytest.raises(ValueError, match="full stop"):
        sign(KEY, f"{ID}.{TIME}", TIME, BODY)


@pytest.mark.parametrize(
    ("now", "verdict"), [(300, "valid"), (301, "stale"), (-300, "valid"), (-301, "stale")]
)
def test_a_message_is_stale_five_minutes_from_its_time(now: int, verdict: str) -> None:
    assert judge(now=TIME + now) == verdict
    # What isn't authentic is told apart first: a forger learns nothing about the clock.
    assert judge(now=TIME + now, keys=[OTHER]) is SignatureVerdict.WRONG_SIGNATURE


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_not base64", "whsec_YWJj", "é", "A" * 400])
def test_a_secret_that_is_no_key_is_refused_without_being_quoted(secret: str) -> None:
    with pytest.raises(ValueError, match="a signing") as refused:
        decode_secret(secret)
    assert len(secret) < 3 or secret not in str(refused.value)
