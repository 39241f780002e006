"""What an endpoint can say that isn't so: what becomes of it is what the page says, and no two lies cover each
other."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.block_lies import LIES, REFUSED, BlockLie, Outcome, columns_changed, outcome
from tracelake.evm.columns import Proof
from tracelake.evm.raw_block import Senders, Verify
from tracelake.evm.verify import check_block

PAGE = Path(__file__).parents[3] / "docs" / "chains.md"
MODES = [
    (Verify.FULL, Senders.DERIVE),
    (Verify.FULL, Senders.NODE),
    (Verify.BLOOM, Senders.NODE),
    (Verify.OFF, Senders.NODE),
]
PAIRS = [
    pair
    for pair in combinations(LIES, 2)
    if pair[0].block == pair[1].block and not any(x.chain_id for x in pair)
]


def lie_table() -> str:
    head = (
        "| an endpoint says | `full` | `full`, `senders: node` | `bloom` | `off` |\n|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {lie.name} | {' | '.join(outcome(lie, level, senders) for level, senders in MODES)} |\n"
        for lie in LIES
    )


def test_the_page_says_what_becomes_of_every_lie() -> None:
    assert lie_table() in PAGE.read_text(encoding="utf-8"), f"docs/chains.md must have:\n{lie_table()}"


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_lie_gets_through_full_only_about_what_is_the_nodes_word(lie: BlockLie) -> None:
    known = lie.forged()
    changed = columns_changed(lie.honest, known) if outcome(lie, Verify.FULL) is Outcome.MISSED else set()
    assert {proof for _, _, proof in changed} <= {Proof.NODE}


def test_no_two_lies_cover_each_other() -> None:
    assert len(PAIRS) > 400
    covered = []
    for first, second in PAIRS:
        known = first.forged()
        try:
            second.apply(known.raw)
        # The first one has removed what the second one is about.
        except (IndexError, KeyError, ValueError, StopIteration, AssertionError):
            continue
        try:
            check_block(known.raw, Verify.FULL, known.chain_id)
            changed = columns_changed(first.honest, known)
        except REFUSED:
            continue
        if any(proof is not Proof.NODE for _, _, proof in changed):
            covered.append((first.name, second.name, changed))
    assert covered == []


def test_the_honest_blocks_verify() -> None:
    for known in {lie.block: lie.honest for lie in LIES}.values():
        check_block(known.raw, Verify.FULL, known.chain_id)
        assert columns_changed(known, replace(known)) == set()
