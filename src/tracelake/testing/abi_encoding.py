"""The contract ABI's encoding as its specification defines it, recursively and without any shortcut: what decoders
are held against. And strategies for types, events and values."""

from __future__ import annotations

from typing import Any, assert_never

from hypothesis import strategies as st

from tracelake.domain.event_abi.model import AbiType, Array, Bytes, Event, Param, Tuple, Word, WordKind
from tracelake.evm.keccak import keccak256


def encode(types: list[AbiType], values: list[Any]) -> bytes:
    """``enc((T1, …, Tk))`` of the specification."""
    heads: list[bytes | None] = []
    tails: list[bytes] = []
    for kind, value in zip(types, values, strict=True):
        encoded = encode_value(kind, value)
        heads.append(None if kind.dynamic else encoded)
        tails.append(encoded if kind.dynamic else b"")
    offset = sum(32 if head is None else len(head) for head in heads)
    result = b""
    for head, tail in zip(heads, tails, strict=True):
        result += offset.to_bytes(32, "big") if head is None else head
        offset += len(tail)
    return result + b"".join(tails)


def encode_value(kind: AbiType, value: Any) -> bytes:
    match kind:
        case Word():
            return encode_word(kind, value)
        case Bytes(text):
            content = str(value).encode() if text else bytes(value)
            return len(content).to_bytes(32, "big") + content + bytes(-len(content) % 32)
        case Array(item, length):
            counted = b"" if length is not None else len(value).to_bytes(32, "big")
            return counted + encode([item] * len(value), value)
        case Tuple(fields):
            return encode([field.type for field in fields], value)
        case _:
            assert_never(kind)


def encode_word(kind: Word, value: Any) -> bytes:
    match kind.kind:
        case WordKind.UINT | WordKind.UFIXED | WordKind.BOOL:
            return int(value).to_bytes(32, "big")
        case WordKind.INT | WordKind.FIXED:
            return int(value).to_bytes(32, "big", signed=True)
        case WordKind.ADDRESS:
            return bytes(12) + bytes(value)
        case WordKind.BYTES | WordKind.FUNCTION:
            return bytes(value) + bytes(32 - len(value))
        case _:
            assert_never(kind.kind)


def log_of(event: Event, values: list[Any]) -> tuple[list[bytes], bytes]:
    """Topics and data of a log of the event."""
    topics = [] if event.anonymous else [keccak256(event.signature.encode())]
    for param, value in zip(event.params, values, strict=True):
        if param.hashed:
            # What exactly is hashed is the contract's business: decoders only see the hash.
            topics.append(keccak256(encode_value(param.type, value)))
        elif param.indexed:
            topics.append(encode_value(param.type, value))
    pairs = [(p.type, v) for p, v in zip(event.params, values, strict=True) if not p.indexed]
    return topics, encode([kind for kind, _ in pairs], [value for _, value in pairs])


def words() -> st.SearchStrategy[Word]:
    bits = st.integers(1, 32).map(lambda size: size * 8)
    return st.one_of(
        st.builds(Word, st.sampled_from([WordKind.UINT, WordKind.INT]), bits),
        st.builds(Word, st.sampled_from([WordKind.FIXED, WordKind.UFIXED]), bits, st.integers(0, 80)),
        st.builds(Word, st.just(WordKind.BYTES), st.integers(1, 32)),
        st.sampled_from([Word(WordKind.ADDRESS), Word(WordKind.BOOL), Word(WordKind.FUNCTION)]),
    )


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(
        ["", "from", "to", "value", "Value", "address", "block_number", "event", "value_string", "x"]
    )


def types() -> st.SearchStrategy[AbiType]:
    plain: st.SearchStrategy[AbiType] = st.one_of(words(), st.builds(Bytes, st.booleans()))
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.builds(Array, inner, st.one_of(st.none(), st.integers(1, 3))),
            st.lists(st.builds(Param, names(), inner), min_size=1, max_size=3).map(
                lambda fields: Tuple(tuple(fields))
            ),
        ),
        max_leaves=4,
    )


@st.composite
def events(draw: st.DrawFn) -> Event:
    anonymous = draw(st.booleans())
    kinds = draw(st.lists(types(), max_size=6))
    room = 4 if anonymous else 3
    params = []
    for kind in kinds:
        indexed = room > 0 and draw(st.booleans())
        room -= indexed
        params.append(Param(draw(names()), kind, indexed))
    return Event(draw(st.sampled_from(["Transfer", "Swap", "E_1"])), tuple(params), anonymous)


def values(kind: AbiType) -> st.SearchStrategy[Any]:
    match kind:
        case Word(WordKind.UINT | WordKind.UFIXED, bits):
            return st.one_of(st.integers(0, (1 << bits) - 1), st.just((1 << bits) - 1))
        case Word(WordKind.INT | WordKind.FIXED, bits):
            return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
        case Word(WordKind.BOOL):
            return st.booleans()
        case Word(WordKind.ADDRESS):
            return st.binary(min_size=20, max_size=20)
        case Word(_, size):
            width = size or 24
            return st.binary(min_size=width, max_size=width)
        case Bytes(text):
            return st.text(max_size=70) if text else st.binary(max_size=70)
        case Array(item, length):
            low, high = (0, 3) if length is None else (length, length)
            return st.lists(values(item), min_size=low, max_size=high)
        case Tuple(fields):
            return st.tuples(*(values(field.type) for field in fields)).map(list)
        case _:
            assert_never(kind)


def event_values(event: Event) -> st.SearchStrategy[list[Any]]:
    return st.tuples(*(values(param.type) for param in event.params)).map(list)
