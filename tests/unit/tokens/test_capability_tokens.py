"""Capability tokens: what is issued, what is refused, and how keys rotate under them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tracelake.contracts.token_claims import TokenClaims, TokenDataset, TokenPrefixes
from tracelake.domain.errors import Invalid, TracelakeError, Unauthenticated, Unavailable
from tracelake.tokens import capability, jose, private_files
from tracelake.tokens.capability import JwksCache
from tracelake.tokens.jose import parse_jwks, public_jwk
from tracelake.tokens.signing import MAX_LIFETIME_SECONDS, OVERLAP_SECONDS, KeyState, PemKeyring

NOW = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
ISSUER, AUDIENCE = "tracelake-dispatcher", "tracelake-task"
TASK, ORG = UUID(int=7, version=4), UUID(int=9, version=4)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.fixture
def keyring(tmp_path: Path) -> PemKeyring:
    return PemKeyring(tmp_path / "keys")


async def issue(signer: Any, now: datetime = NOW, timeout: int = 600, **more: Any) -> capability.IssuedToken:
    return await capability.issue(
        signer,
        issuer=ISSUER,
        audience=AUDIENCE,
        org_id=ORG,
        task_id=TASK,
        attempt=2,
        timeout_seconds=timeout,
        now=now,
        **more,
    )


def verify(token: str, keyring: PemKeyring, now: datetime = NOW, **more: Any) -> TokenClaims:
    arguments = {"audience": AUDIENCE, "issuer": ISSUER, "now": now} | more
    return capability.verify(token, keyring.public_keys(now), **arguments)


def refusal(token: str, keyring: PemKeyring, now: datetime = NOW, **more: Any) -> str:
    with pytest.raises(Unauthenticated) as caught:
        verify(token, keyring, now, **more)
    assert caught.value.status == 401
    return caught.value.reason


def b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def private_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key((folder / "key-000000000000.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def forge(key: ec.EllipticCurvePrivateKey, header: str, payload: bytes) -> str:
    """A token with any header and payload, signed for real."""
    signed = f"{b64(header.encode())}.{b64(payload)}".encode()
    r, s = decode_dss_signature(key.sign(signed, jose.ES256))
    return f"{signed.decode()}.{b64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def header_for(folder: Path, **more: Any) -> dict[str, Any]:
    return {"alg": "ES256", "kid": public_jwk(private_key(folder).public_key())["kid"], "typ": "JWT"} | more


def compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class TestIssuing:
    async def test_a_token_carries_its_attempt_datasets_and_prefixes(self, keyring: PemKeyring) -> None:
        dataset = TokenDataset(dataset_uuid=uuid4(), dataset_version=uuid4(), name="blocks")
        s3 = TokenPrefixes(read=("s3://lake/in/",), write=("s3://lake/out/",), scratch=("s3://lake/tmp/",))
        issued = await issue(keyring, datasets=[dataset], s3=s3, jti=UUID(int=7))
        claims = verify(issued.token, keyring)
        assert claims == issued.claims
        assert (claims.task_id, claims.attempt, claims.org_id) == (TASK, 2, ORG)
        assert claims.datasets == (dataset,)
        assert claims.s3 == s3
        assert claims.jti == str(UUID(int=7))

    async def test_an_independent_library_accepts_the_token_by_the_published_keys(
        self, keyring: PemKeyring
    ) -> None:
        issued = await issue(keyring)
        key_set = jwt.PyJWKSet.from_dict(dict(await keyring.jwks(NOW)))
        key = key_set[jwt.get_unverified_header(issued.token)["kid"]]
        options: Any = {"verify_exp": False, "verify_iat": False}
        claims = jwt.decode(issued.token, key, ["ES256"], audience=AUDIENCE, issuer=ISSUER, options=options)
        assert msgspec.convert(claims, TokenClaims) == issued.claims
        assert set(claims) == {
            *("iss", "aud", "sub", "iat", "exp", "jti", "org_id", "task_id", "attempt", "datasets", "s3")
        }

    @pytest.mark.parametrize(
        ("timeout", "lifetime"), [(1, 301), (600, 900), (86_100, 86_400), (86_101, 86_400), (10**6, 86_400)]
    )
    async def test_lifetime_is_the_timeout_and_five_minutes_but_at_most_a_day(
        self, keyring: PemKeyring, timeout: int, lifetime: int
    ) -> None:
        issued = await issue(keyring, timeout=timeout)
        assert issued.expires_at == at(lifetime)
        assert verify(issued.token, keyring, at(lifetime - 1), leeway=0)
        assert refusal(issued.token, keyring, at(lifetime), leeway=0) == "TokenExpired"

    @pytest.mark.parametrize("prefix", ["s3://lake/in", "s3://lake/", "s3://lake/*/", "lake/in/"])
    async def test_prefixes_that_are_not_canonical_are_not_issued(
        self, keyring: PemKeyring, prefix: str
    ) -> None:
        with pytest.raises(Invalid, match=r"canonical|empty|forbidden|neither"):
            await issue(keyring, s3=TokenPrefixes(scratch=(prefix,)))

    async def test_a_token_that_no_verifier_would_take_is_not_issued(self, keyring: PemKeyring) -> None:
        many = [TokenDataset(dataset_uuid=uuid4(), dataset_version=uuid4(), name=None)] * 200
        with pytest.raises(Invalid) as caught:
            await issue(keyring, datasets=many)
        assert caught.value.reason == "TokenTooLong"

    async def test_times_without_a_zone_are_refused(self, keyring: PemKeyring) -> None:
        with pytest.raises(ValueError, match="zone"):
            await issue(keyring, now=NOW.replace(tzinfo=None))

    async def test_the_token_is_not_in_the_repr(self, keyring: PemKeyring) -> None:
        issued = await issue(keyring)
        assert issued.token not in repr(issued)

    def test_renewal_is_due_in_the_last_quarter(self) -> None:
        assert not capability.renewal_due(at(900), 600, at(675))
        assert capability.renewal_due(at(900), 600, at(676))


class TestRefusals:
    @pytest.fixture
    def folder(self, keyring: PemKeyring, tmp_path: Path) -> Path:
        return tmp_path / "keys"

    @pytest.fixture
    async def good(self, keyring: PemKeyring) -> str:
        return (await issue(keyring)).token

    @pytest.fixture
    async def claims(self, keyring: PemKeyring) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins((await issue(keyring)).claims)
        return built

    def test_the_forging_helper_makes_good_tokens(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any]
    ) -> None:
        header = compact_json(header_for(folder))
        assert verify(forge(private_key(folder), header, compact_json(claims).encode()), keyring)

    @pytest.mark.parametrize("alg", ["none", "None", "HS256", "ES384", "RS256", "es256", None, 1])
    def test_any_other_algorithm(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any], alg: Any
    ) -> None:
        header = compact_json(header_for(folder, alg=alg))
        token = forge(private_key(folder), header, compact_json(claims).encode())
        assert refusal(token, keyring) == "TokenInvalid"

    @pytest.mark.parametrize("signature", ["", "AA"])
    def test_no_signature(self, keyring: PemKeyring, folder: Path, good: str, signature: str) -> None:
        header, payload, _ = good.split(".")
        assert refusal(f"{header}.{payload}.{signature}", keyring) == "TokenInvalid"
        none = b64(b'{"alg":"none"}')
        assert refusal(f"{none}.{payload}.", keyring) == "TokenInvalid"

    def test_hmac_with_the_public_key_as_the_secret(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any]
    ) -> None:
        public = private_key(folder).public_key()
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        for alg in ("HS256", "ES256"):
            head = b64(compact_json(header_for(folder, alg=alg)).encode())
            signed = f"{head}.{b64(compact_json(claims).encode())}"
            token = f"{signed}.{b64(hmac.new(pem, signed.encode(), hashlib.sha256).digest())}"
            assert refusal(token, keyring) == "TokenInvalid"

    def test_a_signature_of_zeros(self, keyring: PemKeyring, good: str) -> None:
        assert refusal(f"{good.rpartition('.')[0]}.{b64(bytes(64))}", keyring) == "TokenBadSignature"

    def test_a_changed_payload(self, keyring: PemKeyring, good: str, claims: dict[str, Any]) -> None:
        header, _, signature = good.split(".")
        payload = b64(compact_json(claims | {"attempt": 3}).encode())
        assert refusal(f"{header}.{payload}.{signature}", keyring) == "TokenBadSignature"

    def test_another_key_under_a_published_name(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any]
    ) -> None:
        stranger = ec.generate_private_key(ec.SECP256R1())
        token = forge(stranger, compact_json(header_for(folder)), compact_json(claims).encode())
        assert refusal(token, keyring) == "TokenBadSignature"

    async def test_an_unknown_key(self, keyring: PemKeyring, tmp_path: Path) -> None:
        token = (await issue(PemKeyring(tmp_path / "other"))).token
        assert refusal(token, keyring) == "TokenUnknownKey"

    @pytest.mark.parametrize(
        "extra",
        [
            {"jku": "https://evil.example/jwks"},
            {"x5u": "https://evil.example/cert"},
            {"jwk": {"kty": "EC"}},
            {"x5c": []},
            {"crit": ["exp"]},
            {"crit": []},
            {"b64": False},
            {"zip": "DEF"},
            {"typ": "at+jwt"},
            {"kid": None},
            {"kid": ["a"]},
        ],
        ids=str,
    )
    def test_header_fields_that_steer_the_verifier(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any], extra: dict[str, Any]
    ) -> None:
        header = compact_json(header_for(folder, **extra))
        token = forge(private_key(folder), header, compact_json(claims).encode())
        assert refusal(token, keyring) == "TokenInvalid"

    @pytest.mark.parametrize(
        "mangle",
        [
            lambda header: header.replace("{", '{"alg":"none",', 1),
            lambda header: header.replace("}", ',"kid":"x"}'),
            lambda header: header.replace(",", ", "),
            lambda header: compact_json(dict(reversed(json.loads(header).items()))),
            lambda header: header.replace("ES256", "\\u0045S256"),
            lambda header: "[]",
            lambda header: "",
            lambda header: '"x"',
        ],
    )
    def test_headers_that_are_not_canonical(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any], mangle: Any
    ) -> None:
        header = mangle(compact_json(header_for(folder)))
        token = forge(private_key(folder), header, compact_json(claims).encode())
        assert refusal(token, keyring) == "TokenInvalid"

    @pytest.mark.parametrize(
        "mangle",
        [
            lambda token: token + "=",
            lambda token: token + "\n",
            lambda token: " " + token,
            lambda token: token.replace(".", "..", 1),
            lambda token: token + ".",
            lambda token: token.rpartition(".")[0],
            lambda token: token.replace(".", ".!", 1),
            lambda token: token[:-1] + chr(ord(token[-1]) + 1),
            lambda token: token + "é",
            lambda token: "",
            lambda token: "..",
            lambda token: "\udc80" + token,
        ],
    )
    def test_spellings_that_are_not_canonical(self, keyring: PemKeyring, good: str, mangle: Any) -> None:
        assert refusal(mangle(good), keyring) in ("TokenInvalid", "TokenBadSignature")

    def test_an_over_long_token(self, keyring: PemKeyring, good: str) -> None:
        assert refusal(good + "A" * 16_384, keyring) == "TokenTooLong"

    def test_somebody_elses_token(self, keyring: PemKeyring, good: str) -> None:
        assert refusal(good, keyring, audience="tracelake-user") == "TokenWrongAudience"
        assert refusal(good, keyring, issuer="another-installation") == "TokenWrongIssuer"

    async def test_times_outside_of_the_lifetime(
        self, keyring: PemKeyring, folder: Path, good: str, claims: dict[str, Any]
    ) -> None:
        assert verify(good, keyring, at(-30))
        assert refusal(good, keyring, at(-31)) == "TokenNotYetValid"
        assert verify(good, keyring, at(929))
        assert refusal(good, keyring, at(930)) == "TokenExpired"
        later = compact_json(claims | {"nbf": claims["iat"] + 100}).encode()
        token = forge(private_key(folder), compact_json(header_for(folder)), later)
        assert refusal(token, keyring) == "TokenNotYetValid"

    @pytest.mark.parametrize(
        "change",
        [
            {"attempt": "2"},
            {"attempt": 2.5},
            {"attempt": True},
            {"attempt": 0},
            {"aud": [AUDIENCE]},
            {"exp": "9999999999"},
            {"exp": None},
            {"iat": -1},
            {"exp": 10**30},
            {"task_id": "not-a-uuid"},
            {"datasets": {}},
            {"datasets": [{"dataset_uuid": str(ORG)}]},
            {"s3": []},
            {"s3": {"read": "s3://lake/in/"}},
            {"nbf": "soon"},
        ],
        ids=str,
    )
    def test_claims_of_the_wrong_type(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any], change: dict[str, Any]
    ) -> None:
        payload = compact_json(claims | change).encode()
        token = forge(private_key(folder), compact_json(header_for(folder)), payload)
        assert refusal(token, keyring) == "TokenInvalid"

    @pytest.mark.parametrize(
        "claim", ["iss", "aud", "sub", "iat", "exp", "jti", "org_id", "task_id", "attempt", "datasets", "s3"]
    )
    def test_a_missing_claim(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any], claim: str
    ) -> None:
        del claims[claim]
        payload = compact_json(claims).encode()
        token = forge(private_key(folder), compact_json(header_for(folder)), payload)
        assert refusal(token, keyring) == "TokenInvalid"

    @pytest.mark.parametrize("payload", [b"", b"[]", b"null", b"\xff", b'{"iss":'])
    def test_a_payload_that_is_no_object(self, keyring: PemKeyring, folder: Path, payload: bytes) -> None:
        token = forge(private_key(folder), compact_json(header_for(folder)), payload)
        assert refusal(token, keyring) == "TokenInvalid"

    @pytest.mark.parametrize("lifetime", [MAX_LIFETIME_SECONDS + 1, 0, -5])
    def test_a_lifetime_that_is_never_issued(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any], lifetime: int
    ) -> None:
        payload = compact_json(claims | {"exp": claims["iat"] + lifetime}).encode()
        token = forge(private_key(folder), compact_json(header_for(folder)), payload)
        assert refusal(token, keyring) == "TokenInvalid"

    def test_a_claim_of_a_newer_dispatcher_is_ignored(
        self, keyring: PemKeyring, folder: Path, claims: dict[str, Any]
    ) -> None:
        payload = compact_json(claims | {"region": "eu"}).encode()
        assert verify(forge(private_key(folder), compact_json(header_for(folder)), payload), keyring)


class TestKeyring:
    def test_key_and_folder_are_for_their_owner_alone(self, keyring: PemKeyring, tmp_path: Path) -> None:
        folder = tmp_path / "keys"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
    def test_a_key_that_others_can_reach_is_refused(
        self, keyring: PemKeyring, tmp_path: Path, mode: int
    ) -> None:
        (tmp_path / "keys" / "key-000000000000.pem").chmod(mode)
        with pytest.raises(TracelakeError, match="chmod 600") as caught:
            PemKeyring(tmp_path / "keys")
        assert caught.value.reason == "SecretExposed"

    def test_a_folder_that_others_can_reach_is_refused(self, keyring: PemKeyring, tmp_path: Path) -> None:
        (tmp_path / "keys").chmod(0o755)
        with pytest.raises(TracelakeError, match="chmod 700"):
            PemKeyring(tmp_path / "keys")

    def test_files_that_are_no_p256_key_are_refused(self, keyring: PemKeyring, tmp_path: Path) -> None:
        path = tmp_path / "keys" / "key-000000000001.pem"
        keys = (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048))
        pems = [
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            for key in keys
        ]
        for content in (*pems, b"", b"-----BEGIN PRIVATE KEY-----\n"):
            path.write_bytes(content)
            path.chmod(0o600)
            with pytest.raises(TracelakeError) as caught:
                PemKeyring(tmp_path / "keys")
            assert caught.value.reason == "KeyFileInvalid"

    def test_a_pem_file_with_another_name_is_refused_rather_than_overlooked(
        self, keyring: PemKeyring, tmp_path: Path
    ) -> None:
        (tmp_path / "keys" / "mine.pem").write_bytes(b"")
        with pytest.raises(TracelakeError, match="not named"):
            PemKeyring(tmp_path / "keys")

    async def test_processes_that_start_at_once_end_up_with_one_key(self, tmp_path: Path) -> None:
        script = (
            "import sys, asyncio, datetime, pathlib\n"
            "from tracelake.tokens.signing import PemKeyring\n"
            "sys.stdin.readline()\n"
            "ring = PemKeyring(pathlib.Path(sys.argv[1]))\n"
            "jwks = asyncio.run(ring.jwks(datetime.datetime.now(datetime.UTC)))\n"
            "print(*(key['kid'] for key in jwks['keys']))\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "keys")]
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        printed = {process.communicate(timeout=60)[0].strip() for process in started}
        assert [process.returncode for process in started] == [0] * 4
        assert len(printed) == 1
        assert len(printed.pop().split()) == 1
        assert [path.name for path in (tmp_path / "keys").iterdir()] == ["key-000000000000.pem"]

    async def test_jwks_holds_public_parts_named_by_thumbprint(
        self, keyring: PemKeyring, tmp_path: Path
    ) -> None:
        (key,) = (await keyring.jwks(NOW))["keys"]
        assert set(key) == {"kty", "crv", "x", "y", "kid", "use", "alg"}
        assert (key["kty"], key["crv"], key["use"], key["alg"]) == ("EC", "P-256", "sig", "ES256")
        essence = f'{{"crv":"P-256","kty":"EC","x":"{key["x"]}","y":"{key["y"]}"}}'
        assert key["kid"] == b64(hashlib.sha256(essence.encode()).digest())
        assert len(key["x"]) == len(key["y"]) == 43

    def test_the_private_key_is_not_in_any_repr(self, keyring: PemKeyring) -> None:
        assert "private" not in repr(keyring.keys(NOW)).lower()
        assert "private" not in repr(keyring._cached).lower()


class TestRotation:
    async def test_a_new_key_is_published_first_and_signs_later(self, keyring: PemKeyring) -> None:
        (before,) = keyring.keys(NOW)
        new = keyring.rotate(NOW)
        assert [(key.kid, key.state) for key in keyring.keys(NOW)] == [
            (before.kid, KeyState.ACTIVE),
            (new, KeyState.NEXT),
        ]
        early = (await issue(keyring, at(OVERLAP_SECONDS - 1))).token
        late = (await issue(keyring, at(OVERLAP_SECONDS))).token
        assert capability.key_id(early) == before.kid
        assert capability.key_id(late) == new
        assert verify(early, keyring, at(OVERLAP_SECONDS))
        assert verify(late, keyring, at(OVERLAP_SECONDS))

    async def test_a_retired_key_is_published_until_its_last_token_is_over(self, keyring: PemKeyring) -> None:
        keyring.rotate(NOW)
        last = await issue(keyring, at(OVERLAP_SECONDS - 1), timeout=10**6)
        (retired, active) = keyring.keys(at(OVERLAP_SECONDS))
        assert (retired.state, active.state) == (KeyState.RETIRED, KeyState.ACTIVE)
        end = last.expires_at - timedelta(seconds=1)
        assert verify(last.token, keyring, end)
        assert len((await keyring.jwks(end))["keys"]) == 2
        gone = at(OVERLAP_SECONDS + MAX_LIFETIME_SECONDS + 300)
        assert [key["kid"] for key in (await keyring.jwks(gone))["keys"]] == [active.kid]
        assert capability.key_id(last.token) not in keyring.public_keys(gone)

    def test_rotating_again_keeps_the_pending_key(self, keyring: PemKeyring) -> None:
        assert keyring.rotate(NOW) == keyring.rotate(at(1))
        assert len(keyring.keys(at(1))) == 2

    async def test_an_urgent_rotation_does_not_wait_for_the_pending_key(
        self, keyring: PemKeyring, tmp_path: Path
    ) -> None:
        keyring.rotate(NOW)
        leaked = (await issue(keyring)).token
        urgent = keyring.rotate(NOW, overlap_seconds=0)
        (tmp_path / "keys" / "key-000000000000.pem").unlink()
        assert capability.key_id((await issue(keyring, at(1))).token) == urgent
        assert refusal(leaked, keyring, at(1)) == "TokenUnknownKey"

    def test_rotating_removes_keys_that_nothing_needs(self, keyring: PemKeyring, tmp_path: Path) -> None:
        keyring.rotate(NOW)
        keyring.rotate(at(OVERLAP_SECONDS + MAX_LIFETIME_SECONDS + 299))
        assert len(list((tmp_path / "keys").iterdir())) == 3
        keyring.rotate(at(OVERLAP_SECONDS + MAX_LIFETIME_SECONDS + 300))
        assert len(list((tmp_path / "keys").iterdir())) == 2

    async def test_replicas_that_share_the_folder_agree(
        self, keyring: PemKeyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As if the folder had been left alone for long: only the change itself may bring the key in.
        monkeypatch.setattr(private_files, "SETTLE_NS", 0)
        replica = PemKeyring(tmp_path / "keys")
        os.utime(tmp_path / "keys", (1, 1))
        assert len(replica.keys(NOW)) == 1
        new = keyring.rotate(NOW)
        assert [key.kid for key in replica.keys(NOW)][-1] == new
        token = (await issue(replica, at(OVERLAP_SECONDS))).token
        assert capability.key_id(token) == new
        assert verify(token, keyring, at(OVERLAP_SECONDS))

    async def test_a_file_spoilt_while_running_does_not_stop_signing(
        self, keyring: PemKeyring, tmp_path: Path
    ) -> None:
        assert keyring.keys(NOW)
        (tmp_path / "keys" / "key-000000000009.pem").write_bytes(b"half a ke")
        assert verify((await issue(keyring)).token, keyring)
        with pytest.raises(TracelakeError):
            keyring.rotate(NOW)


class FakeEndpoint:
    """The JWKS endpoint as a verifier reaches it."""

    def __init__(self, keyring: PemKeyring) -> None:
        self.keyring = keyring
        self.now = NOW
        self.requests = 0
        self.down = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, url: str) -> bytes:
        assert url == "http://dispatcher/internal/jwks/task"
        self.requests += 1
        await self.gate.wait()
        if self.down:
            raise ConnectionError("refused")
        return msgspec.json.encode(await self.keyring.jwks(self.now))


class TestJwksCache:
    @pytest.fixture
    def endpoint(self, keyring: PemKeyring) -> FakeEndpoint:
        return FakeEndpoint(keyring)

    @pytest.fixture
    def clock(self) -> list[float]:
        return [1000.0]

    @pytest.fixture
    def cache(self, endpoint: FakeEndpoint, clock: list[float]) -> JwksCache:
        url = "http://dispatcher/internal/jwks/task"
        return JwksCache(url, endpoint.fetch, clock=lambda: clock[0])

    async def check(self, cache: JwksCache, token: str, now: datetime = NOW) -> TokenClaims:
        return await cache.verify(token, audience=AUDIENCE, issuer=ISSUER, now=now)

    async def test_keys_are_fetched_once_and_kept(
        self, cache: JwksCache, endpoint: FakeEndpoint, keyring: PemKeyring
    ) -> None:
        token = (await issue(keyring)).token
        for _ in range(5):
            assert (await self.check(cache, token)).task_id == TASK
        assert endpoint.requests == 1

    async def test_made_up_keys_cannot_hammer_the_dispatcher(
        self, cache: JwksCache, endpoint: FakeEndpoint, tmp_path: Path, clock: list[float]
    ) -> None:
        stranger = (await issue(PemKeyring(tmp_path / "stranger"))).token
        for _ in range(50):
            with pytest.raises(Unauthenticated) as caught:
                await self.check(cache, stranger)
            assert caught.value.reason == "TokenUnknownKey"
            clock[0] += 0.5
        assert endpoint.requests == 5

    async def test_callers_at_once_share_one_fetch(
        self, cache: JwksCache, endpoint: FakeEndpoint, keyring: PemKeyring
    ) -> None:
        token = (await issue(keyring)).token
        endpoint.gate.clear()
        callers = [asyncio.create_task(self.check(cache, token)) for _ in range(10)]
        while not endpoint.requests:
            await asyncio.sleep(0)
        callers[0].cancel()
        endpoint.gate.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, TokenClaims) for result in results[1:])
        assert endpoint.requests == 1

    async def test_a_rotated_key_is_found_by_its_unknown_name(
        self, cache: JwksCache, endpoint: FakeEndpoint, keyring: PemKeyring, clock: list[float]
    ) -> None:
        await self.check(cache, (await issue(keyring)).token)
        keyring.rotate(NOW)
        token = (await issue(keyring, at(OVERLAP_SECONDS))).token
        clock[0] += 6
        assert await self.check(cache, token, at(OVERLAP_SECONDS))
        assert endpoint.requests == 2

    async def test_an_aged_cache_learns_the_next_key_before_its_first_token(
        self, cache: JwksCache, endpoint: FakeEndpoint, keyring: PemKeyring, clock: list[float]
    ) -> None:
        token = (await issue(keyring)).token
        await self.check(cache, token)
        keyring.rotate(NOW)
        clock[0] += 301
        await self.check(cache, token)
        endpoint.down = True
        assert await self.check(cache, (await issue(keyring, at(OVERLAP_SECONDS))).token, at(OVERLAP_SECONDS))

    async def test_known_keys_serve_through_an_outage_but_not_for_ever(
        self, cache: JwksCache, endpoint: FakeEndpoint, keyring: PemKeyring, clock: list[float]
    ) -> None:
        token = (await issue(keyring)).token
        await self.check(cache, token)
        endpoint.down = True
        clock[0] += 3599
        assert await self.check(cache, token)
        clock[0] += 10
        with pytest.raises(Unavailable):
            await self.check(cache, token)

    async def test_without_any_keys_the_answer_is_try_later(
        self, cache: JwksCache, endpoint: FakeEndpoint, keyring: PemKeyring, clock: list[float]
    ) -> None:
        token = (await issue(keyring)).token
        endpoint.down = True
        for _ in range(3):
            with pytest.raises(Unavailable):
                await self.check(cache, token)
        assert endpoint.requests == 1
        endpoint.down = False
        clock[0] += 5
        assert await self.check(cache, token)

    @pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"keys":{}}', b"x" * 70_000])
    def test_a_malformed_document_is_no_key_set(self, document: bytes) -> None:
        with pytest.raises(Unavailable):
            parse_jwks(document)

    def test_a_point_off_the_curve_is_no_key(self) -> None:
        jwk = public_jwk(ec.generate_private_key(ec.SECP256R1()).public_key())
        with pytest.raises(Unavailable):
            parse_jwks(msgspec.json.encode({"keys": [jwk | {"x": jwk["y"]}]}))

    def test_keys_of_other_kinds_are_skipped(self) -> None:
        jwk = public_jwk(ec.generate_private_key(ec.SECP256R1()).public_key())
        others = [{"kty": "RSA", "kid": "r", "n": "AQ", "e": "AQAB"}, jwk | {"use": "enc", "kid": "e"}]
        assert list(parse_jwks(msgspec.json.encode({"keys": [*others, jwk]}))) == [jwk["kid"]]
