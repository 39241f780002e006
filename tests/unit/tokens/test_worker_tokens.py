"""Worker and user tokens: rotation without restart, and secrets that stay secret."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tracelake import durable_files
from tracelake.domain.errors import TracelakeError, Unauthenticated
from tracelake.tokens import opaque_tokens, private_files
from tracelake.tokens.opaque_tokens import WorkerTokens, create_token_file, first_token

OLD, NEW = "old-" + "a" * 32, "new-" + "b" * 32


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_first_start_creates_one_random_token_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "worker-tokens"
    assert create_token_file(path)
    token = first_token(path)
    assert not create_token_file(path)
    assert first_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.startswith("tlw_")
    assert len(token) >= 43
    WorkerTokens(file=path).check(token)


def test_whoever_comes_second_adopts_the_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert durable_files.create_private(path, b"first")
    assert not durable_files.create_private(path, b"second")
    assert private_files.read_private(path) == b"first"
    assert [found.name for found in tmp_path.iterdir()] == ["secret"]


def test_an_unchanged_file_is_not_read_again_unless_it_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "tokens", OLD)
    fresh = private_files.ChangeMark(path)
    assert [fresh.changed(), fresh.changed()] == [True, True]
    monkeypatch.setattr(private_files, "SETTLE_NS", 0)
    settled = private_files.ChangeMark(path)
    assert [settled.changed(), settled.changed()] == [True, False]
    write(path, OLD + NEW)
    assert [settled.changed(), settled.changed()] == [True, False]


def test_processes_that_start_at_once_end_up_with_one_token(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from tracelake.tokens.opaque_tokens import create_token_file, first_token\n"
        "sys.stdin.readline()\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "create_token_file(path)\n"
        "print(first_token(path))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tokens")]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    printed = {process.communicate("go\n", timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(printed) == 1


def test_all_tokens_of_file_and_settings_are_valid_and_nothing_else_is(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", f"# two of them\n\n{OLD}\n  {NEW}  \n")
    listed = "listed-" + "c" * 32
    tokens = WorkerTokens(file=path, tokens=[listed])
    for token in (OLD, NEW, listed):
        assert tokens.accepts(token)
    for wrong in (OLD[:-1], OLD + " ", OLD.upper(), "# two of them", "", "x" * 10_000, "\udc80é"):
        assert not tokens.accepts(wrong)


def test_a_missing_and_a_wrong_token_are_told_apart(tmp_path: Path) -> None:
    tokens = WorkerTokens(tokens=[OLD])
    for presented, reason in (
        (None, "WorkerTokenMissing"),
        ("", "WorkerTokenMissing"),
        (NEW, "WorkerTokenInvalid"),
    ):
        with pytest.raises(Unauthenticated) as caught:
            tokens.check(presented)
        assert caught.value.reason == reason


def test_rotation_needs_no_restart(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", OLD)
    tokens = WorkerTokens(file=path)
    assert tokens.accepts(OLD)
    os.utime(path, (1, 1))
    assert not tokens.accepts(NEW)
    write(path, f"{OLD}\n{NEW}\n")
    assert tokens.accepts(OLD)
    assert tokens.accepts(NEW)
    replacement = write(tmp_path / "edited", NEW)
    replacement.replace(path)
    assert not tokens.accepts(OLD)
    assert tokens.accepts(NEW)


@pytest.mark.parametrize("spoil", ["short", "empty", "exposed", "gone"])
def test_a_file_spoilt_while_running_leaves_the_last_good_tokens_and_says_so(
    tmp_path: Path, spoil: str
) -> None:
    path = write(tmp_path / "tokens", OLD)
    tokens = WorkerTokens(file=path)
    match spoil:
        case "short":
            write(path, f"{OLD}\nsecretpart")
        case "empty":
            write(path, "")
        case "exposed":
            path.chmod(0o644)
        case "gone":
            path.unlink()
    with capture_logs() as logs:
        assert tokens.accepts(OLD)
    assert [entry["event"] for entry in logs] == ["worker_token_file_unusable"]
    assert "secretpart" not in repr(logs)
    assert OLD not in repr(logs)
    write(path, NEW)
    assert tokens.accepts(NEW)
    assert not tokens.accepts(OLD)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("", 0o600), ("# nothing\n", 0o600), ("short\n", 0o600), ("x" * 600, 0o600), (OLD, 0o640), (OLD, 0o604)],
)
def test_a_file_that_proves_nothing_is_refused_at_start(tmp_path: Path, text: str, mode: int) -> None:
    with pytest.raises(TracelakeError):
        WorkerTokens(file=write(tmp_path / "tokens", text, mode))


@pytest.mark.parametrize("token", ["short", "with space " + "x" * 32, "é" * 40, "x" * 513])
def test_weak_tokens_in_settings_are_refused_without_being_shown(token: str) -> None:
    with pytest.raises(TracelakeError) as caught:
        WorkerTokens(tokens=[token])
    assert token not in str(caught.value)


def test_without_any_token_there_is_no_start() -> None:
    with pytest.raises(TracelakeError) as caught:
        WorkerTokens()
    assert caught.value.reason == "NoWorkerToken"


def test_only_digests_stay_in_memory_and_none_in_the_repr(tmp_path: Path) -> None:
    tokens = WorkerTokens(file=write(tmp_path / "tokens", OLD), tokens=[NEW])
    assert repr(tokens) == "WorkerTokens(2 valid)"
    held = repr(vars(tokens))
    assert OLD not in held
    assert NEW not in held
    assert hashlib.sha256(OLD.encode()).digest() in tokens._from_file


def test_user_tokens_are_random_prefixed_and_kept_as_hashes() -> None:
    token, digest = opaque_tokens.new_user_token()
    other, _ = opaque_tokens.new_user_token()
    assert token != other
    assert token.startswith("tlu_")
    assert digest == opaque_tokens.hash_user_token(token) == hashlib.sha256(token.encode()).digest()
    assert opaque_tokens.looks_like_user_token(token)
    for odd in ("", "tlw_" + "x" * 43, "tlu_" + "x" * 200, "tlu_é"):
        assert not opaque_tokens.looks_like_user_token(odd)
    assert len(opaque_tokens.hash_user_token("\udc80")) == 32
