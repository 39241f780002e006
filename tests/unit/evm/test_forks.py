"""Fork rules: a header's fields name its fork, no combination that no fork has is believed, and what a version
doesn't know is said as such."""

from __future__ import annotations

import copy
import random

import pytest

from tests.support.evm_blocks import CHAIN_ID, made_block, seal
from tests.support.recorded_blocks import RECORDED, SYNTHETIC, KnownBlock
from tracelake.evm.forks import (
    FORKS,
    LATER_FIELDS,
    NEWEST,
    SCHEDULES,
    Contradiction,
    Fork,
    fork_of,
    scheduled,
)
from tracelake.evm.raw_block import BlockMismatch, RawBlock, UnknownFork, Verify
from tracelake.evm.verify import check_block

ETHEREUM, SEPOLIA = SCHEDULES[1], SCHEDULES[11_155_111]


@pytest.mark.parametrize("known", [*RECORDED, *SYNTHETIC], ids=str)
def test_the_fields_of_a_header_name_its_fork(known: KnownBlock) -> None:
    found = fork_of(known.raw.block)
    assert found >= known.fork
    # Those between add no field to the header, so they look like the ones before them.
    assert all(rules.header == () for rules in FORKS[known.fork + 1 : found + 1])
    assert found is NEWEST or FORKS[found + 1].header


@pytest.mark.parametrize("field", [name for name, _ in LATER_FIELDS])
def test_a_field_of_a_later_fork_alone_is_an_invention(field: str) -> None:
    first = LATER_FIELDS[0][0]
    header = {field: "0x1"} if field != first else {"blobGasUsed": "0x1"}
    with pytest.raises(Contradiction, match="no fork has that"):
        fork_of(header)


def test_half_of_a_forks_fields_are_no_fork() -> None:
    fields = {name: "0x1" for name, _ in LATER_FIELDS}
    assert fork_of(fields) is Fork.AMSTERDAM
    del fields["slotNumber"]
    with pytest.raises(Contradiction, match="ends with blockAccessListHash and lacks slotNumber"):
        fork_of(fields)


@pytest.mark.parametrize(
    ("number", "time", "fork"),
    [
        (0, 1_438_269_988, Fork.FRONTIER),
        (4_369_999, 1_508_131_303, Fork.FRONTIER),
        (4_370_000, 1_508_131_331, Fork.BYZANTIUM),
        (12_965_000, 1_628_166_822, Fork.LONDON),
        (15_537_394, 1_663_224_179, Fork.PARIS),
        (17_034_869, 1_681_338_443, Fork.PARIS),
        (17_034_870, 1_681_338_455, Fork.SHANGHAI),
        (20_066_032, 1_718_100_000, Fork.CANCUN),
        (23_935_694, 1_764_798_551, Fork.OSAKA),
    ],
)
def test_forks_of_ethereum_begin_at_their_block_or_time(number: int, time: int, fork: Fork) -> None:
    assert scheduled(ETHEREUM, number, time) is fork


def test_every_schedule_rises() -> None:
    for schedule in SCHEDULES.values():
        forks = [start.fork for start in schedule]
        assert forks == sorted(set(forks))
        for starts in (
            [start.block for start in schedule if start.block is not None],
            [start.time for start in schedule if start.time is not None],
        ):
            assert starts == sorted(starts)
    assert SEPOLIA[0].fork is Fork.LONDON


def test_recorded_blocks_of_ethereum_are_in_its_schedule() -> None:
    for known in RECORDED:
        if known.chain_id == 1:
            time = int(known.raw.block["timestamp"], 16)
            assert scheduled(ETHEREUM, known.raw.number, time) is known.fork


def test_an_endpoint_that_does_not_know_a_fork_lacks_its_fields() -> None:
    [known] = [each for each in RECORDED if each.name == "Ethereum 20066032"]
    raw = copy.deepcopy(known.raw)
    for name in ("blobGasUsed", "excessBlobGas", "parentBeaconBlockRoot"):
        del raw.block[name]
    lacks = "lacks blobGasUsed, excessBlobGas, parentBeaconBlockRoot, which a block of Cancun has"
    with pytest.raises(BlockMismatch, match=lacks):
        check_block(raw, Verify.FULL, known.chain_id)
    # On a chain that nobody has a schedule of, the hash is all that there is.
    with pytest.raises(BlockMismatch, match="the header's hash is"):
        check_block(raw, Verify.FULL, None)


@pytest.fixture
def newer() -> RawBlock:
    """A block whose header has a field more than this version knows."""
    raw = made_block(random.Random(3), 9, transactions=2)
    honest = raw.block["hash"]
    raw.block["stateExpiryRoot"] = "0x" + "11" * 32
    raw.block["hash"] = "0x" + "22" * 32
    for each in (*raw.block["transactions"], *(raw.receipts or [])):
        each["blockHash"] = raw.block["hash"]
        for log in each.get("logs", ()):
            log["blockHash"] = raw.block["hash"]
    assert honest != raw.block["hash"]
    return raw


def test_a_newer_fork_is_named_with_its_fields_and_the_way_out(newer: RawBlock) -> None:
    with pytest.raises(UnknownFork) as refused:
        check_block(newer, Verify.FULL, CHAIN_ID)
    assert str(refused.value) == (
        "block 9 from made: its hash isn't that of its known header fields, and it has stateExpiryRoot: newer fork "
        "than this version knows; `verify: bloom` works, or upgrade"
    )
    check_block(newer, Verify.BLOOM, CHAIN_ID)


def test_a_field_that_is_not_hashed_is_no_fork() -> None:
    raw = made_block(random.Random(3), 9, transactions=2)
    raw.block["stateExpiryRoot"] = "0x" + "11" * 32
    check_block(raw, Verify.FULL, CHAIN_ID)


def test_the_gas_of_a_block_is_the_sum_of_its_transactions_until_amsterdam() -> None:
    raw = made_block(random.Random(3), 9, transactions=2)
    seal(raw, more_gas=7)
    with pytest.raises(BlockMismatch, match=r"the block used .* gas, and its transactions"):
        check_block(raw, Verify.FULL, CHAIN_ID)
    raw.block.update(blockAccessListHash="0x" + "33" * 32, slotNumber="0x9")
    seal(raw, more_gas=7)
    check_block(raw, Verify.FULL, CHAIN_ID)
