"""Verification of a block: that it is what its header commits to, and that nothing is missing from it.

``bloom`` checks that the parts belong together: transactions, receipts and logs all name this block and their
places in it, and the logs are those that the bloom filters cover, as far as filters can show. Fields are
compared as text first, which is how they arrive; since some clients pad numbers or write capitals, only those
that differ are parsed. ``full`` proves it: all roots and hashes are computed again, so the block's hash covers
every byte. ``off`` only checks that the answer is for the requested block.

What no hash covers but follows from what is hashed is checked as well: the sender from the signature
(``Senders.DERIVE``), gas, prices, created contracts, the chain of signatures, and that nothing is given that the
block's fork doesn't have. Where an endpoint may leave such a field out, ``decode`` fills it in. The rest is the
endpoint's word: uncles' hashes, the block's size and total difficulty, the price of blob gas, and
traces, apart from what ``traces`` checks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from tracelake.domain.errors import TracelakeError
from tracelake.evm.consensus import (
    BLOB_GAS,
    TransactionParts,
    contract_address,
    header_hash,
    receipt_bytes,
    signed_chain,
    signed_hash,
    transaction_parts,
    type_of,
    withdrawal_bytes,
)
from tracelake.evm.forks import Contradiction, Fork, fork_of, missing_fields, unknown_fields
from tracelake.evm.hashing import BITS_OF, EMPTY_ROOT, NO_UNCLES, keccak256, ordered_root
from tracelake.evm.profiles.profile import ETHEREUM, ChainProfile, rewritten
from tracelake.evm.profiles.proof import CannotProve, check_free, check_own_fields, own_bytes, within_roots
from tracelake.evm.profiles.registry import (
    BLOOM_WORKS,
    advice_about_type,
    profile_of_block,
    refuse_unprovable,
    set_chain,
)
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    BlockUnprovable,
    RawBlock,
    Senders,
    UnknownFork,
    UnknownTransactionType,
    Verify,
    same_number,
    same_text,
)
from tracelake.evm.senders import recover_senders
from tracelake.evm.traces import check_traces

__all__ = ["BlockMalformed", "BlockMismatch", "Contradiction", "check_block", "check_parts", "prove_block"]

JsonObject = dict[str, Any]
# Indexes are compared as text, so the usual ones are written once.
_PLACES = [hex(place) for place in range(1 << 12)]
_MANY = 4  # from this number of logs on, addresses and topics are likely to repeat
_TYPE = re.compile(r"0x[0-9a-fA-F]{1,2}")
_NO_LOGS = "0x" + "0" * 512
_NO_WITHDRAWALS = "0x" + EMPTY_ROOT.hex()


def check_block(
    raw: RawBlock, level: Verify, chain_id: int | None = None, senders: Senders = Senders.DERIVE
) -> None:
    """Raises ``BlockMismatch`` naming the block, the endpoint and what doesn't match, ``BlockMalformed``, or
    ``Unprovable`` if its encoding isn't known.

    A block without receipts (they weren't requested) is checked without them. ``chain_id`` is the chain that the
    transactions must be of.
    """
    try:
        _check(rewritten(raw.block, raw.profile), raw, level, chain_id, senders)
    except _UnknownHeader as found:
        raise UnknownFork(raw.number, raw.endpoint, str(found)) from None
    except CannotProve as found:
        raise BlockUnprovable(raw.number, raw.endpoint, str(found)) from None
    except UnknownTransactionType as found:
        if not _TYPE.fullmatch(found.kind):
            raise BlockMalformed(raw.number, raw.endpoint, "type", f"isn't one: {found.kind!r}") from None
        where = f"block {raw.number} from {raw.endpoint}: "
        raise UnknownTransactionType(found.kind, where, advice_about_type(found.kind, raw.profile)) from None
    except Contradiction as found:
        # A mismatch is retried on another endpoint, so one bad answer doesn't fail the range.
        raise BlockMismatch(raw.number, raw.endpoint, str(found)) from None
    except KeyError as missing:
        problem = f"is missing{_what_works(raw, level, chain_id)}"
        raise BlockMalformed(raw.number, raw.endpoint, str(missing.args[0]), problem) from None
    # An endpoint's JSON may have any type anywhere. Checking every field first would cost more than the proof.
    except (TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        problem = f"can't be read: {error}{_what_works(raw, level, chain_id)}"
        raise BlockMalformed(raw.number, raw.endpoint, "a field", problem) from None


def _what_works(raw: RawBlock, level: Verify, chain_id: int | None) -> str:
    """Whether a block that is malformed for ``full`` has all that ``bloom`` needs, as a clause."""
    if level is not Verify.FULL:
        return ""
    try:
        check_block(raw, Verify.BLOOM, chain_id)
    except TracelakeError:
        return ""
    return f"; {BLOOM_WORKS}"


def _check(
    block: dict[str, Any], raw: RawBlock, level: Verify, chain_id: int | None, senders: Senders
) -> None:
    if not same_number(block["number"], hex(raw.number)):
        raise Contradiction(f"the answer is block {int(block['number'], 16)}")
    if level is Verify.OFF:
        return
    if level is Verify.FULL:
        refuse_unprovable(raw.profile)
    check_parts(block, raw.receipts, chain_id, raw.profile)
    if level is Verify.FULL:
        prove_block(block, raw.receipts, chain_id, senders, raw.profile)
    # After the proof: what traces are compared with is true then.
    if raw.traces is not None:
        check_traces(block, raw.receipts, raw.traces, chain_id, gas=level is Verify.FULL, profile=raw.profile)


class _UnknownHeader(Exception):
    """A header's hash isn't that of its known fields, and it has others."""


def check_parts(
    block: JsonObject,
    receipts: list[JsonObject] | None,
    chain_id: int | None,
    profile: ChainProfile = ETHEREUM,
) -> None:
    transactions = block["transactions"]
    _check_transactions(block, transactions, None if chain_id is None else hex(chain_id), profile)
    if receipts is None:
        return
    outside = profile.places_outside_roots(block)
    places: Sequence[int] = range(len(transactions))
    if len(receipts) != len(transactions):
        places = _places_with_receipts(transactions, receipts, outside if profile.may_lack_receipts else ())
    bits, bits_outside = _check_receipts(block, places, receipts, outside, profile)
    # Endpoints differ on whether the filter has the logs of transactions that the roots don't cover.
    if not any(_stands_for(block["logsBloom"], each) for each in {bits, bits | bits_outside}):
        raise Contradiction("the logs don't give the block's logsBloom")


def _places_with_receipts(
    transactions: Sequence[JsonObject], receipts: Sequence[JsonObject], may_lack: Collection[int]
) -> list[int]:
    """The places of the transactions that the receipts are of, where some transactions may have none."""
    given = {receipt["transactionHash"] for receipt in receipts}
    places = [place for place, tx in enumerate(transactions) if place not in may_lack or tx["hash"] in given]
    if len(places) != len(receipts):
        raise Contradiction(f"{len(receipts)} receipts for {len(transactions)} transactions")
    return places


def _stands_for(bloom: str, bits: int) -> bool:
    return same_text(bloom, "0x" + bits.to_bytes(256, "big").hex())


def _check_transactions(
    block: JsonObject, transactions: Sequence[JsonObject], chain: str | None, profile: ChainProfile
) -> None:
    block_hash, number = block["hash"], block["number"]
    for place, (tx, index) in enumerate(zip(transactions, _places(0, len(transactions)), strict=True)):
        if tx["blockHash"] != block_hash and not same_text(tx["blockHash"], block_hash):
            raise Contradiction(f"transaction {place} is of block {tx['blockHash']}, not {block_hash}")
        if tx["blockNumber"] != number and not same_number(tx["blockNumber"], number):
            raise Contradiction(f"transaction {place} is of block number {tx['blockNumber']}")
        if tx["transactionIndex"] != index and not same_number(tx["transactionIndex"], index):
            raise Contradiction(f"transaction {place} has the index {tx['transactionIndex']}")
        # Legacy transactions from before EIP-155 have no chain id.
        if chain is not None and (own := tx.get("chainId")) != chain and own and not same_number(own, chain):
            # Clients compute the chain from a signature, also where there is none.
            if profile.is_system(tx):
                continue
            raise Contradiction(f"transaction {place} is of chain {int(own, 16)}, not {int(chain, 16)}")


def _check_receipts(
    block: JsonObject,
    places: Sequence[int],
    receipts: Sequence[JsonObject],
    outside: Collection[int],
    profile: ChainProfile,
) -> tuple[int, int]:
    """Check that each receipt is of the transaction at its place and has the filter of its logs; return the filter
    of all logs, and that of transactions outside of the roots by itself."""
    block_hash, number, transactions = block["hash"], block["number"], block["transactions"]
    bits = bits_outside = logs_before = 0
    indexes = _places(0, len(transactions))
    for place, receipt in zip(places, receipts, strict=True):
        tx_hash, index = transactions[place]["hash"], indexes[place]
        if receipt["transactionHash"] != tx_hash and not same_text(receipt["transactionHash"], tx_hash):
            raise Contradiction(
                f"receipt {place} is of transaction {receipt['transactionHash']}, not {tx_hash}"
            )
        if receipt["blockHash"] != block_hash and not same_text(receipt["blockHash"], block_hash):
            raise Contradiction(f"receipt {place} is of block {receipt['blockHash']}, not {block_hash}")
        if receipt["blockNumber"] != number and not same_number(receipt["blockNumber"], number):
            raise Contradiction(f"receipt {place} is of block number {receipt['blockNumber']}")
        if receipt["transactionIndex"] != index and not same_number(receipt["transactionIndex"], index):
            raise Contradiction(f"receipt {place} has the index {receipt['transactionIndex']}")
        logs, bloom = receipt["logs"], receipt["logsBloom"]
        if logs:
            restarts = profile.log_indexes_restart and same_number(logs[0]["logIndex"], "0x0")
            own = _check_logs(receipt, logs, 0 if restarts else logs_before)
            if not _stands_for(bloom, own):
                raise Contradiction(f"the logs of receipt {place} don't give its logsBloom")
            if place in outside:
                bits_outside |= own
            else:
                bits |= own
            logs_before += len(logs)
        # Most receipts have no logs: one comparison of text instead of building a filter.
        elif bloom != _NO_LOGS:
            raise Contradiction(f"receipt {place} has no logs, and a logsBloom that stands for some")
    return bits, bits_outside


def _check_logs(receipt: JsonObject, logs: Sequence[JsonObject], before: int) -> int:
    """Check that logs are their receipt's and numbered without a gap; return their bloom filter."""
    block_hash, number = receipt["blockHash"], receipt["blockNumber"]
    tx_hash, index = receipt["transactionHash"], receipt["transactionIndex"]
    filtered: list[str] = []
    for log, place in zip(logs, _places(before, len(logs)), strict=True):
        if log["logIndex"] != place and not same_number(log["logIndex"], place):
            raise Contradiction(
                f"log {int(place, 16)} has the index {int(log['logIndex'], 16)}: one is missing or double"
            )
        if log["blockHash"] != block_hash and not same_text(log["blockHash"], block_hash):
            raise Contradiction(f"log {int(place, 16)} is of block {log['blockHash']}, not {block_hash}")
        if log["transactionHash"] != tx_hash and not same_text(log["transactionHash"], tx_hash):
            raise Contradiction(
                f"log {int(place, 16)} is of transaction {log['transactionHash']}, not {tx_hash}"
            )
        if log["blockNumber"] != number and not same_number(log["blockNumber"], number):
            raise Contradiction(f"log {int(place, 16)} is of block number {log['blockNumber']}")
        if log["transactionIndex"] != index and not same_number(log["transactionIndex"], index):
            raise Contradiction(f"log {int(place, 16)} is of transaction index {log['transactionIndex']}")
        # A node marks logs of a block that a reorg has removed.
        if log.get("removed"):
            raise Contradiction(f"log {int(place, 16)} is marked as removed")
        filtered.append(log["address"])
        filtered += log["topics"]
    bits = 0
    # A set costs more than it saves until values repeat.
    for value in filtered if len(logs) < _MANY else set(filtered):
        bits |= BITS_OF[value]
    return bits


def _places(start: int, count: int) -> list[str]:
    """Indexes from ``start`` on, as JSON-RPC writes them."""
    end = start + count
    return _PLACES[start:end] if end <= len(_PLACES) else list(map(hex, range(start, end)))


def prove_block(
    block: JsonObject,
    receipts: list[JsonObject] | None,
    chain_id: int | None,
    senders: Senders = Senders.DERIVE,
    profile: ChainProfile = ETHEREUM,
) -> None:
    """Compute every root and hash again. ``receipts`` are in the order of their transactions, one for each but
    those that may have none."""
    fork = fork_of(block)
    _prove_header(block, chain_id, profile)
    transactions: list[JsonObject] = block["transactions"]
    if outside := profile.places_outside_roots(block):
        transactions, receipts = within_roots(transactions, receipts, outside, profile)
    signed: list[JsonObject] = []
    parts: list[TransactionParts] = []
    encoded: list[bytes] = []
    for tx in transactions:
        own = profile.types.get(type_of(tx))
        if own is not None:
            encoded.append(own_bytes(tx, own))
            continue
        each = transaction_parts(tx)
        encoded.append(each.encoded)
        if not profile.is_system(tx):
            signed.append(tx)
            parts.append(each)
        elif profile.system_sender is not None and not same_text(tx["from"], profile.system_sender):
            raise Contradiction(f"a transaction without a signature is from {tx['from']}")
    for place, (tx, content) in enumerate(zip(transactions, encoded, strict=True)):
        # The comparison of text is the usual case; ``_must_be`` also accepts capitals.
        if "0x" + keccak256(content).hex() != tx["hash"]:
            _must_be(f"the hash of transaction {place}", keccak256(content), tx["hash"])
    _must_be("the transactions' root", ordered_root(encoded), block["transactionsRoot"])
    _prove_withdrawals(block, profile)
    _check_uncles(block)
    for tx in signed:
        _check_signature(tx, chain_id)
    if senders is Senders.DERIVE:
        _prove_senders(signed, parts)
    if profile.types:
        check_own_fields(transactions, receipts, profile)
    if receipts is None:
        return
    root = ordered_root([receipt_bytes(receipt, profile.types) for receipt in receipts])
    _must_be("the receipts' root", root, block["receiptsRoot"])
    _check_derived(block, transactions, receipts, fork, profile)


def _prove_header(block: JsonObject, chain_id: int | None, profile: ChainProfile) -> None:
    own = None if profile.header is None else profile.header(block)
    computed = header_hash(block) if own is None else keccak256(own)
    if same_text(block["hash"], "0x" + computed.hex()):
        return
    of_block = profile_of_block(block)
    if of_block is not None and of_block is not profile:
        raise CannotProve(
            f"its header is not one of chain profile {profile.name}, and has fields of {of_block.name}: "
            f"{set_chain([of_block.name])}, or {BLOOM_WORKS}"
        )
    if (lacking := missing_fields(block, chain_id)) is not None:
        fork, names = lacking
        raise Contradiction(f"the header lacks {', '.join(names)}, which a block of {fork.title} has")
    if unknown := unknown_fields(block):
        raise _UnknownHeader(", ".join(unknown))
    if profile is ETHEREUM and chain_id is not None and chain_id not in ETHEREUM.chain_ids:
        # Nobody knows whether the endpoint is wrong, or the chain different.
        raise Contradiction(
            f"the header's hash is 0x{computed.hex()}, and {block['hash']} was given; if every endpoint of this "
            f"chain answers so, it doesn't hash headers as Ethereum does, and {BLOOM_WORKS}"
        )
    _must_be("the header's hash", computed, block["hash"])


def _prove_senders(transactions: Sequence[JsonObject], parts: Sequence[TransactionParts]) -> None:
    signed = [signed_hash(tx, each) for tx, each in zip(transactions, parts, strict=True)]
    for tx, sender in zip(transactions, recover_senders(signed), strict=True):
        place = int(tx["transactionIndex"], 16)
        if sender is None:
            raise Contradiction(f"transaction {place} has a signature that nobody can have made")
        if tx["from"] != sender and not same_text(tx["from"], sender):
            raise Contradiction(f"transaction {place} is from {tx['from']}, and {sender} signed it")


def _check_uncles(block: JsonObject) -> None:
    """The hash covers the uncles' headers, which aren't here: it only shows whether there are any."""
    if bool(block.get("uncles")) == same_text(block["sha3Uncles"], NO_UNCLES):
        given = (
            "uncles, and its sha3Uncles stands for none"
            if block.get("uncles")
            else "no uncles, and its sha3Uncles stands for some"
        )
        raise Contradiction(f"the block has {given}")


def _must_be(what: str, computed: bytes, given: str) -> None:
    if not same_text(given, "0x" + computed.hex()):
        raise Contradiction(f"{what} is 0x{computed.hex()}, and {given} was given")


def _prove_withdrawals(block: JsonObject, profile: ChainProfile) -> None:
    root, withdrawals = block.get("withdrawalsRoot"), block.get("withdrawals")
    if profile.withdrawals_root_is_state:
        if withdrawals:
            raise Contradiction(f"there are withdrawals, and chain profile {profile.name} has none")
        return
    if root is None:
        if withdrawals:
            raise Contradiction("there are withdrawals without a withdrawalsRoot")
        return
    # Some clients leave out an empty list.
    if withdrawals is None and same_text(root, _NO_WITHDRAWALS):
        return
    computed = ordered_root([withdrawal_bytes(one) for one in block["withdrawals"]])
    _must_be("the withdrawals' root", computed, root)


def _check_derived(
    block: JsonObject,
    transactions: Sequence[JsonObject],
    receipts: Sequence[JsonObject],
    fork: Fork,
    profile: ChainProfile,
) -> None:
    """Check the fields that no hash covers but that follow from hashed ones."""
    # There is no base fee before London.
    base_fee, gas_before = int(block.get("baseFeePerGas") or "0x0", 16), 0
    for place, (tx, receipt) in enumerate(zip(transactions, receipts, strict=True)):
        if type_of(tx) != type_of(receipt):
            raise Contradiction(
                f"receipt {place} is of type {receipt.get('type')}, its transaction of {tx.get('type')}"
            )
        if not same_text(receipt["from"], tx["from"]):
            raise Contradiction(f"receipt {place} has another sender than its transaction")
        gas = int(receipt["cumulativeGasUsed"], 16)
        if int(receipt["gasUsed"], 16) != gas - gas_before:
            raise Contradiction(
                f"receipt {place} used {receipt['gasUsed']} gas, and {gas - gas_before:#x} were added up"
            )
        gas_before = gas
        own = profile.types.get(type_of(tx))
        _check_recipient(place, tx, receipt, derive=own is None or own.creates)
        if own is not None:
            check_free(place, receipt, own)
        elif not profile.own_fees:
            _check_prices(place, tx, receipt, base_fee)
    # Since Amsterdam a block's gas is counted without refunds, and by the dearest of two resources.
    if fork < Fork.AMSTERDAM and not profile.own_fees and gas_before != int(block["gasUsed"], 16):
        raise Contradiction(f"the block used {block['gasUsed']} gas, and its transactions {gas_before:#x}")


def _check_recipient(place: int, tx: JsonObject, receipt: JsonObject, *, derive: bool) -> None:
    to, made = tx.get("to"), receipt.get("contractAddress")
    given = receipt.get("to")
    if given != to and (given is None or to is None or not same_text(given, to)):
        raise Contradiction(f"receipt {place} has another recipient than its transaction")
    if made is None:
        return
    if to is not None:
        raise Contradiction(f"receipt {place} has a contractAddress, and its transaction a recipient")
    if derive and not same_text(made, contract_address(tx["from"], tx["nonce"])):
        raise Contradiction(f"receipt {place} has a contractAddress that its sender can't have made")


def _check_signature(tx: JsonObject, chain_id: int | None) -> None:
    """``v`` and ``yParity`` say the same, and so do a legacy signature and the chain."""
    v, parity, chain = tx.get("v"), tx.get("yParity"), tx.get("chainId")
    if v is None:
        return
    place, number = int(tx["transactionIndex"], 16), int(v, 16)
    signed_for = signed_chain(number)
    if signed_for is not None:
        expected = chain_id if chain is None else int(chain, 16)
        if expected is not None and expected != signed_for:
            raise Contradiction(f"transaction {place} is of chain {expected}, and signed for {signed_for}")
        number = (number - 35) % 2
    elif number >= 27:
        number -= 27
    if parity is not None and int(parity, 16) != number:
        raise Contradiction(f"transaction {place} has the parity {parity}, and v is {v}")


def _check_prices(place: int, tx: JsonObject, receipt: JsonObject, base_fee: int) -> None:
    kind, effective = type_of(tx), receipt.get("effectiveGasPrice")
    if kind in ("0x0", "0x1"):
        price = int(tx["gasPrice"], 16)
    else:
        most = int(tx["maxFeePerGas"], 16)
        price = min(most, base_fee + int(tx["maxPriorityFeePerGas"], 16))
        given = tx.get("gasPrice")
        # Clients report the price that was paid, or the highest one that was offered.
        if given is not None and int(given, 16) not in (price, most):
            raise Contradiction(f"transaction {place} has the gasPrice {given}, and its fees give {price:#x}")
    if effective is not None and int(effective, 16) != price:
        raise Contradiction(
            f"receipt {place} has the effectiveGasPrice {effective}, and it follows {price:#x}"
        )
    if kind == "0x3" and (blob_gas := receipt.get("blobGasUsed")) is not None:
        expected = hex(BLOB_GAS * len(tx["blobVersionedHashes"]))
        if not same_number(blob_gas, expected):
            raise Contradiction(
                f"receipt {place} has the blobGasUsed {blob_gas}, and its blobs take {expected}"
            )
