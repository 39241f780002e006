"""Secrets come from the worker's environment or a private file, and leave no trace in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracelake.domain.errors import TracelakeError
from tracelake.tokens import private_files
from tracelake.tokens.named_secrets import MissingSecret, SecretProvider


def private(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def revealed(provider: SecretProvider, *names: str) -> dict[str, str]:
    return {name: value.reveal() for name, value in provider.resolve(names).items()}


def test_environment_comes_first_and_is_emptied(tmp_path: Path) -> None:
    file = private(tmp_path / "secrets", "RPC_KEY=of the file\nother=also=this\n# a comment\n\n")
    environment = {"TRACELAKE_SECRET_RPC_KEY": "of the environment", "PATH": "/bin"}
    provider = SecretProvider(environment, file)
    assert environment == {"PATH": "/bin"}
    assert revealed(provider, "RPC_KEY", "rpc_key", "other") == {
        "RPC_KEY": "of the environment",
        "rpc_key": "of the environment",
        "other": "also=this",
    }


def test_a_missing_secret_is_named_with_what_to_do(tmp_path: Path) -> None:
    provider = SecretProvider({}, private(tmp_path / "secrets", '{"there": "x"}'))
    with pytest.raises(MissingSecret, match=r"no secret a, b: set TRACELAKE_SECRET_A"):
        provider.resolve(["there", "a", "b"])


def test_the_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file = private(tmp_path / "secrets", "key=old")
    provider = SecretProvider({}, file)
    private(file, "key=renewed")
    assert revealed(provider, "key") == {"key": "renewed"}


@pytest.mark.parametrize(
    "content", ["no equals sign of value hush", '{"key": {"hush": 1}}', "{hush", "=hush"]
)
def test_a_damaged_file_is_refused_without_quoting_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(TracelakeError) as refusal:
        SecretProvider({}, private(tmp_path / "secrets", content))
    assert "hush" not in refusal.value.message


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = private(tmp_path / "secrets", "key=value")
    file.chmod(0o644)
    with pytest.raises(TracelakeError, match="chmod 600"):
        SecretProvider({}, file)


def test_a_file_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TracelakeError, match="can't read"):
        SecretProvider({}, tmp_path / "nowhere")


def test_a_file_that_became_unusable_stays_so_until_it_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a recent file is read again whatever was seen of it.
    monkeypatch.setattr(private_files, "SETTLE_NS", 0)
    file = private(tmp_path / "secrets", "key=old")
    provider = SecretProvider({}, file)
    for _ in range(2):
        assert revealed(provider, "key") == {"key": "old"}
    private(file, "key=old\nno sign")
    for _ in range(3):
        with pytest.raises(TracelakeError, match="line 2"):
            provider.resolve(["key"])
    private(file, "key=renewed")
    assert revealed(provider, "key") == {"key": "renewed"}
