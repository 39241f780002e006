"""Keccak, RLP, tries and bloom filters agree with published examples and with independent implementations."""

import hashlib
from typing import Any

import pytest
import rlp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import evm_encoding
from tracelake.evm.hashing import (
    EMPTY_HASH,
    EMPTY_ROOT,
    RlpItem,
    bits_of,
    encode_bytes,
    keccak256,
    logs_bloom,
    ordered_root,
    rlp_encode,
)

LANE = (1 << 64) - 1
KECCAK, SHA3 = b"\x01", b"\x06"
LENGTHS = [0, 1, 20, 32, 64, 134, 135, 136, 137, 271, 272, 273, 600]
MESSAGE = bytes(range(256)) * 3

ITEMS: st.SearchStrategy[RlpItem] = st.recursive(
    st.one_of(st.binary(max_size=70), st.integers(0, 2**256), st.binary(min_size=255, max_size=257)),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)
HEX = "0x{}".format


def plain_keccak(message: bytes, padding: bytes) -> bytes:
    """Keccak with 256 bits from its definition. SHA3-256 differs from Keccak-256 in the padding alone."""
    padded = bytearray(message + padding + b"\x00" * (-(len(message) + 1) % 136))
    padded[-1] |= 0x80
    state = [[0] * 5 for _ in range(5)]
    for start in range(0, len(padded), 136):
        for lane in range(17):
            word = int.from_bytes(padded[start + 8 * lane : start + 8 * lane + 8], "little")
            state[lane % 5][lane // 5] ^= word
        state = permuted(state)
    return b"".join(state[lane][0].to_bytes(8, "little") for lane in range(4))


def permuted(a: list[list[int]]) -> list[list[int]]:
    shift_register = 1
    for _ in range(24):
        c = [a[x][0] ^ a[x][1] ^ a[x][2] ^ a[x][3] ^ a[x][4] for x in range(5)]
        d = [c[(x - 1) % 5] ^ turned(c[(x + 1) % 5], 1) for x in range(5)]
        a = [[a[x][y] ^ d[x] for y in range(5)] for x in range(5)]
        x, y, lane = 1, 0, a[1][0]
        for step in range(24):
            x, y = y, (2 * x + 3 * y) % 5
            lane, a[x][y] = a[x][y], turned(lane, (step + 1) * (step + 2) // 2)
        a = [[a[x][y] ^ (~a[(x + 1) % 5][y] & a[(x + 2) % 5][y] & LANE) for y in range(5)] for x in range(5)]
        for bit in range(7):
            shift_register = (shift_register << 1) ^ ((shift_register >> 7) * 0x71)
            shift_register &= 0xFF
            if shift_register & 2:
                a[0][0] ^= 1 << ((1 << bit) - 1)
    return a


def turned(lane: int, by: int) -> int:
    by %= 64
    return ((lane << by) | (lane >> (64 - by))) & LANE


def test_keccak_of_known_messages() -> None:
    assert EMPTY_HASH.hex() == "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert keccak256(b"abc").hex() == "4e03657aea45a94fc7d47ba826c8d667c0d1e6e33a64a036ec44f58fa12d6c45"


@pytest.mark.parametrize("length", LENGTHS)
def test_keccak_equals_its_definition_around_its_block_size(length: int) -> None:
    assert keccak256(MESSAGE[:length]) == plain_keccak(MESSAGE[:length], KECCAK)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_definition_of_keccak_with_the_other_padding_is_the_sha3_of_the_standard_library(
    length: int,
) -> None:
    assert plain_keccak(MESSAGE[:length], SHA3) == hashlib.sha3_256(MESSAGE[:length]).digest()


@pytest.mark.parametrize(
    ("item", "encoded"),
    [
        (b"dog", "83646f67"),
        ([b"cat", b"dog"], "c88363617483646f67"),
        (b"", "80"),
        ([], "c0"),
        (0, "80"),
        (b"\x00", "00"),
        (15, "0f"),
        (127, "7f"),
        (128, "8180"),
        (1024, "820400"),
        ([[], [[]], [[], [[]]]], "c7c0c1c0c3c0c1c0"),
        (b"a" * 55, "b7" + "61" * 55),
        (b"a" * 56, "b838" + "61" * 56),
        ([b"a" * 55], "f838b7" + "61" * 55),
        (b"a" * 256, "b90100" + "61" * 256),
    ],
)
def test_rlp_of_known_items(item: RlpItem, encoded: str) -> None:
    assert rlp_encode(item).hex() == encoded


@settings(deadline=None)
@given(ITEMS)
def test_rlp_of_any_item_is_that_of_the_rlp_library(item: RlpItem) -> None:
    assert rlp_encode(item) == rlp.encode(item)


def test_rlp_has_no_negative_integers() -> None:
    with pytest.raises(ValueError, match="negative"):
        rlp_encode(-1)


def test_the_empty_trie_and_the_empty_list_have_their_known_hashes() -> None:
    assert EMPTY_ROOT.hex() == "56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"
    assert ordered_root([]) == EMPTY_ROOT
    assert (
        keccak256(rlp_encode([])).hex() == "1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"
    )


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=40))
def test_the_root_is_that_of_a_trie_built_by_insertion(values: list[bytes]) -> None:
    assert ordered_root(values) == evm_encoding.trie_root(values)


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 130, 255, 256, 257, 400])),
    st.integers(1, 40),
)
def test_the_root_of_many_values_crosses_every_width_of_key(count: int, size: int) -> None:
    values = (
        [encode_bytes(index.to_bytes(size, "big")) for index in range(count)]
        if size > 1
        else [b"\x01"] * count
    )
    assert ordered_root(values) == evm_encoding.trie_root(values)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "address": st.binary(min_size=20, max_size=20).map(bytes.hex).map(HEX),
                "topics": st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex).map(HEX), max_size=4),
            }
        ),
        max_size=6,
    )
)
def test_the_bloom_filter_is_that_of_its_definition(logs: list[dict[str, Any]]) -> None:
    assert logs_bloom(logs) == evm_encoding.logs_bloom(logs)
    for log in logs:
        only = evm_encoding.logs_bloom([{"address": log["address"], "topics": []}])
        assert bits_of(log["address"]) == int.from_bytes(only, "big")
