"""Logs of any event, encoded by ``eth_abi`` to check our decoder, and strategies for types, events and values."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any, assert_never

from eth_abi import abi
from hypothesis import strategies as st
from tiny_keccak import keccak256

from tracelake.domain.event_abi import AbiEvent, AbiType, Array, Bytes, Param, Tuple, Word, WordKind


def log_of(event: AbiEvent, values: list[Any]) -> tuple[list[bytes], bytes]:
    """Topics and data of a log of the event."""
    topics = [] if event.anonymous else [keccak256(event.signature.encode())]
    for param, value in zip(event.params, values, strict=True):
        if param.hashed:
            # The contract decides which bytes are hashed: decoders only see the hash.
            topics.append(keccak256(encode([param.type], [value])))
        elif param.indexed:
            topics.append(encode([param.type], [value]))
    pairs = [(p.type, v) for p, v in zip(event.params, values, strict=True) if not p.indexed]
    return topics, encode([kind for kind, _ in pairs], [value for _, value in pairs])


def encode(types: list[AbiType], values: list[Any]) -> bytes:
    """The encoding of values, one for each type, by ``eth_abi``."""
    arguments = [_argument(kind, value) for kind, value in zip(types, values, strict=True)]
    return bytes(abi.encode([_spelling(kind) for kind in types], arguments))


def decode_log(event: AbiEvent, topics: list[bytes], data: bytes) -> list[Any]:
    """The values of a log's parameters by ``eth_abi``; None for a parameter that is only there as a hash."""
    own = iter(topics if event.anonymous else topics[1:])
    indexed = {index: next(own) for index, param in enumerate(event.params) if param.indexed}
    unindexed = iter(_decode([param.type for param in event.params if not param.indexed], data))
    values: list[Any] = []
    for index, param in enumerate(event.params):
        if index not in indexed:
            values.append(next(unindexed))
        else:
            values.append(None if param.hashed else _decode([param.type], indexed[index])[0])
    return values


def _decode(types: list[AbiType], data: bytes) -> list[Any]:
    found = abi.decode([_spelling(kind) for kind in types], data)
    return [_value(kind, value) for kind, value in zip(types, found, strict=True)]


def _spelling(kind: AbiType) -> str:
    match kind:
        case Word(WordKind.FIXED | WordKind.UFIXED, size, 0):
            # The library has no fixed-point numbers without places. The specification encodes them as integers.
            return f"{'int' if kind.kind is WordKind.FIXED else 'uint'}{size}"
        case Array(item, length):
            return f"{_spelling(item)}[{'' if length is None else length}]"
        case Tuple(fields):
            return f"({','.join(_spelling(field.type) for field in fields)})"
        case _:
            return kind.canonical


def _argument(kind: AbiType, value: Any) -> Any:
    """A value as the library takes it: fixed-point numbers are decimals there, and their encoded integer here."""
    match kind:
        case Word(WordKind.FIXED | WordKind.UFIXED, _, places) if places:
            with localcontext() as exact:
                exact.prec = 200
                return Decimal(value).scaleb(-places)
        case Array(item, _):
            return [_argument(item, each) for each in value]
        case Tuple(fields):
            return tuple(_argument(field.type, each) for field, each in zip(fields, value, strict=True))
        case _:
            return value


def _value(kind: AbiType, found: Any) -> Any:
    """The inverse of ``_argument``. The library decodes an address to text."""
    match kind:
        case Word(WordKind.FIXED | WordKind.UFIXED, _, places) if places:
            with localcontext() as exact:
                exact.prec = 200
                return int(found.scaleb(places))
        case Word(WordKind.ADDRESS):
            return bytes.fromhex(found[2:])
        case Array(item, _):
            return [_value(item, each) for each in found]
        case Tuple(fields):
            return [_value(field.type, each) for field, each in zip(fields, found, strict=True)]
        case _:
            return found


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
def events(draw: st.DrawFn) -> AbiEvent:
    anonymous = draw(st.booleans())
    kinds = draw(st.lists(types(), max_size=6))
    room = 4 if anonymous else 3
    params = []
    for kind in kinds:
        indexed = room > 0 and draw(st.booleans())
        room -= indexed
        params.append(Param(draw(names()), kind, indexed))
    return AbiEvent(draw(st.sampled_from(["Transfer", "Swap", "E_1"])), tuple(params), anonymous)


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


def event_values(event: AbiEvent) -> st.SearchStrategy[list[Any]]:
    return st.tuples(*(values(param.type) for param in event.params)).map(list)
