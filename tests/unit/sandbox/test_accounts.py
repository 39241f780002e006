"""Accounts: a number of its own for each thing that is kept apart, and never one that somebody else uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracelake.domain.errors import Unavailable
from tracelake.sandbox import accounts


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_FOLDER", tmp_path / "accounts")


def test_two_holders_never_share_a_number_and_a_released_one_is_free_again() -> None:
    first, second = accounts.hold_account("operators"), accounts.hold_account("operators")
    assert first.uid != second.uid
    assert accounts.is_ours(first.uid)
    first.release()
    third = accounts.hold_account("spark")
    assert third.uid == first.uid
    assert third.account.name == "tracelake-spark"
    second.release()
    third.release()


def test_a_folder_keeps_its_account_until_it_is_removed(tmp_path: Path) -> None:
    state, data = tmp_path / "state", tmp_path / "data"
    state.mkdir()
    data.mkdir()
    account = accounts.reserve_account("postgres-state", state)
    assert accounts.reserve_account("postgres-state", state) == account
    assert accounts.reserve_account("postgres-data", data).uid != account.uid
    held = accounts.hold_account("operators")
    assert held.uid not in (account.uid, account.uid + 1)
    held.release()
    state.rmdir()
    assert accounts.reserve_account("postgres-other", data).uid != account.uid
    assert accounts.hold_account("operators").uid == account.uid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as somebody else")
def test_a_number_that_a_process_runs_as_is_passed_over() -> None:
    first = accounts.hold_account("operators")
    first.release()
    code = f"import os; os.setuid({first.uid}); print('x', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        held = accounts.hold_account("operators")
        assert held.uid != first.uid
        held.release()
        process.kill()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "accounts").mkdir(mode=0o755)
    (tmp_path / "accounts").chmod(0o755)
    with pytest.raises(Unavailable, match="open to others"):
        accounts.hold_account("operators")


def test_an_account_is_named_or_numbered_and_anything_else_is_no_account() -> None:
    assert accounts.entry_of("0").pw_name == accounts.entry_of("root").pw_name == "root"
    for nonsense in ("9" * 5000, "4294967295", "-1", "no such name", "", "\N{ARABIC-INDIC DIGIT SEVEN}"):
        with pytest.raises(KeyError):
            accounts.entry_of(nonsense)
