"""Decoding logs: whatever an ABI can say comes back as it was encoded, and nothing else is taken for it."""

import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.abi_encoding import decode_log, event_values, events, log_of
from tests.support.wide_integers import stored_integer
from tracelake.domain.event_abi import (
    SYSTEM_ADDRESS,
    AbiEvent,
    AbiType,
    Array,
    Bytes,
    Tuple,
    Word,
    WordKind,
    parse_signature,
)
from tracelake.domain.operators.decode_events import read_config
from tracelake.evm.abi import decode_logs
from tracelake.evm.abi.columns import MAX_NAME, ParamForm
from tracelake.evm.abi.decode_logs import SKIPPED, LogDecoder, topic0
from tracelake.evm.abi.values import SkipReason
from tracelake.operators.decode_events.operator import decode_table
from tracelake.tables.parquet import check_columns

SCHEMA = pa.schema(
    [
        ("block_number", pa.int64()),
        ("log_index", pa.int64()),
        ("address", pa.binary()),
        *((f"topic{index}", pa.binary()) for index in range(4)),
        ("data", pa.binary()),
    ]
)
CONTRACT = b"\x11" * 20
ERC20, ERC721 = read_config({"events": ["erc20_transfers", "erc721_transfers"]}).events
ALICE, BOB = (bytes(12) + each * 20 for each in (b"\xaa", b"\xbb"))


def table(logs: list[tuple[list[bytes], bytes]], address: bytes = CONTRACT) -> pa.Table:
    rows = [
        {
            "block_number": index // 3,
            "log_index": index,
            "address": address,
            **{f"topic{place}": topic for place, topic in enumerate(topics)},
            "data": data,
        }
        for index, (topics, data) in enumerate(logs)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def decoded(
    logs: pa.Table, *wanted: AbiEvent, addresses: tuple[bytes, ...] = (), hot: bool = False
) -> list[dict[str, Any]]:
    decoder = LogDecoder.of(wanted, addresses, logs.column_names, hot=hot)
    return sorted(decoder.decode(logs).to_pylist(), key=lambda row: row["log_index"])


def skipped(logs: pa.Table, *wanted: AbiEvent) -> list[str | None]:
    return [row[SKIPPED] for row in decoded(logs, *wanted)]


def as_stored(kind: AbiType, value: Any) -> Any:
    """A value as JSON has it."""
    match kind:
        case Word(WordKind.UINT | WordKind.INT, bits):
            return value if bits <= 48 else str(value)
        case Word(WordKind.FIXED | WordKind.UFIXED):
            digits = str(abs(value)).rjust(kind.places + 1, "0")
            whole, part = digits[: len(digits) - kind.places], digits[len(digits) - kind.places :]
            return ("-" if value < 0 else "") + whole + (f".{part}" if part else "")
        case Word(WordKind.BOOL) | Bytes(text=True):
            return value
        case Word() | Bytes():
            return f"0x{value.hex()}"
        case Array(item, _):
            return [as_stored(item, each) for each in value]
        case Tuple(fields):
            found = [as_stored(field.type, each) for field, each in zip(fields, value, strict=True)]
            named = [field.name for field in fields]
            return (
                found if "" in named or len(set(named)) < len(named) else dict(zip(named, found, strict=True))
            )


def check_row(
    event: AbiEvent, sent: list[Any], decoder: LogDecoder, row: dict[str, Any], topics: list[bytes]
) -> None:
    hashes = iter(topics[0 if event.anonymous else 1 :])
    for param, value, place in zip(event.params, sent, decoder.layout.of_events[0], strict=True):
        topic = next(hashes) if param.indexed else b""
        column = decoder.layout.columns[place]
        if param.hashed:
            assert row[column.name] == topic
            assert column.name.startswith(f"{param.name}_hash" if param.name else "arg")
        elif column.form is ParamForm.WIDE:
            assert int(row[f"{column.name}_string"]) == value
            assert row[f"{column.name}_f64"] == float(value)
            signed = isinstance(param.type, Word) and param.type.kind is WordKind.INT
            assert int.from_bytes(row[f"{column.name}_binary"], "big", signed=signed) == value
        elif column.form is ParamForm.JSON:
            assert json.loads(row[column.name]) == as_stored(param.type, value)
        elif isinstance(param.type, Word) and param.type.kind in (WordKind.FIXED, WordKind.UFIXED):
            assert row[column.name] == as_stored(param.type, value)
        else:
            assert row[column.name] == value


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_whatever_an_event_can_carry_comes_back_as_it_was_encoded(data: st.DataObject) -> None:
    event = data.draw(events())
    sent = data.draw(st.lists(event_values(event), min_size=1, max_size=4))
    logs = [log_of(event, values) for values in sent]
    source = table(logs)
    decoder = pickle.loads(pickle.dumps(LogDecoder.of([event], [], source.column_names)))
    result = decoder.decode(source)
    assert [field.name for field in result.schema] == [
        "block_number",
        "log_index",
        "address",
        *(field.name for field in decoder.fields),
    ]
    assert len({name.lower() for name in result.column_names}) == len(result.column_names)
    rows = sorted(result.to_pylist(), key=lambda row: row["log_index"])
    assert len(rows) == len(sent)
    for row, values, (topics, _) in zip(rows, sent, logs, strict=True):
        assert (row["event"], row[SKIPPED]) == (event.name, None)
        check_row(event, values, decoder, row, topics)


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_hostile_data_is_skipped_with_a_reason_and_never_raises(data: st.DataObject) -> None:
    event = data.draw(events())
    topics, payload = log_of(event, data.draw(event_values(event)))
    hostile = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.integers(0, 2)):
            case 0 if hostile:
                hostile[data.draw(st.integers(0, len(hostile) - 1))] ^= data.draw(st.integers(1, 255))
            case 1 if len(hostile) >= 32:
                at = data.draw(st.integers(0, len(hostile) // 32 - 1)) * 32
                word = data.draw(
                    st.sampled_from([0, 32, 64, 96, 2**31, 2**64, 2**255, 2**256 - 1, 2**256 - 32])
                )
                hostile[at : at + 32] = word.to_bytes(32, "big")
            case _:
                del hostile[data.draw(st.integers(0, len(hostile))) :]
    odd = [topic[: data.draw(st.sampled_from([32, 32, 31, 0]))] for topic in topics]
    source = table([(odd, bytes(hostile))])
    [row] = decoded(source, event) or [{SKIPPED: "not its signature"}]
    assert row[SKIPPED] is None or row[SKIPPED] in [*SkipReason, "not its signature"]
    if row[SKIPPED] is None:
        # Data that is accepted although it was changed means the same to another decoder.
        decoder = LogDecoder.of([event], [], source.column_names)
        check_row(event, decode_log(event, odd, bytes(hostile)), decoder, row, odd)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_one_byte_more_or_less_is_another_event(data: st.DataObject) -> None:
    event = data.draw(events())
    topics, payload = log_of(event, data.draw(event_values(event)))
    assume(topics)
    logs = table([(topics, payload + b"\0"), (topics, payload + bytes(32)), (topics, payload[:-1] or b"\0")])
    assert skipped(logs, event) == [SkipReason.WRONG_LENGTH] * 3


def test_arrays_that_point_into_each_other_take_no_longer_than_their_data() -> None:
    event = parse_signature("event Bomb(uint256[][][][][][][][][][] bomb)")
    # Every array has ten items, and all of them are the next array: 10^10 numbers in a few kilobytes.
    words: list[int] = [32]
    for level in range(10):
        words += [10, *(([320] * 10) if level < 9 else ([7] * 10))]
    data = b"".join(word.to_bytes(32, "big") for word in words)
    assert skipped(table([([topic0(event) or b""], data)]), event) == [SkipReason.BAD_OFFSET]


@pytest.mark.parametrize(
    ("signature", "data", "reason"),
    [
        ("event E(bool b)", (2).to_bytes(32, "big"), SkipReason.BAD_BOOL),
        ("event E(address a)", b"\1" + bytes(31), SkipReason.PADDING),
        ("event E(uint8 a)", (256).to_bytes(32, "big"), SkipReason.PADDING),
        ("event E(int8 a)", (128).to_bytes(32, "big"), SkipReason.PADDING),
        ("event E(int8 a)", b"\xff" * 31 + b"\x7f", SkipReason.PADDING),
        ("event E(bytes4 a)", bytes(4) + b"\1" + bytes(27), SkipReason.PADDING),
        (
            "event E(string s)",
            (32).to_bytes(32, "big") + (1).to_bytes(32, "big") + b"\xff" + bytes(31),
            SkipReason.BAD_UTF8,
        ),
        (
            "event E(string s)",
            (32).to_bytes(32, "big") + (1).to_bytes(32, "big") + b"ab" + bytes(30),
            SkipReason.PADDING,
        ),
        ("event E(string s)", (31).to_bytes(32, "big") + bytes(32), SkipReason.BAD_OFFSET),
        ("event E(string s)", (0).to_bytes(32, "big") + bytes(32), SkipReason.BAD_OFFSET),
        ("event E(bytes s)", (32).to_bytes(32, "big") + (2**255).to_bytes(32, "big"), SkipReason.BAD_OFFSET),
        ("event E(uint8[4294967296] s)", bytes(64), SkipReason.WRONG_LENGTH),
        ("event E(string[4294967296] s)", (32).to_bytes(32, "big") + bytes(32), SkipReason.BAD_OFFSET),
        ("event E(bool[] b)", b"".join(n.to_bytes(32, "big") for n in (32, 1, 2)), SkipReason.BAD_BOOL),
    ],
)
def test_what_does_not_decode_strictly_is_skipped_and_says_why(
    signature: str, data: bytes, reason: SkipReason
) -> None:
    event = parse_signature(signature)
    assert skipped(table([([topic0(event) or b""], data)]), event) == [reason]


def test_erc20_and_erc721_transfers_are_told_apart_by_their_topics() -> None:
    hash_ = topic0(ERC20) or b""
    amount = (2**256 - 1).to_bytes(32, "big")
    fungible, token = ([hash_, ALICE, BOB], amount), ([hash_, ALICE, BOB, amount], b"")
    everything_in_data = ([hash_], ALICE + BOB + amount)
    logs = table([fungible, token, everything_in_data])
    assert skipped(logs, ERC20) == [None, SkipReason.OTHER_LAYOUT, SkipReason.OTHER_LAYOUT]
    assert skipped(logs, ERC721) == [SkipReason.OTHER_LAYOUT, None, SkipReason.OTHER_LAYOUT]
    first, second, _ = decoded(logs, ERC20, ERC721)
    assert (first["value_string"], first["token_id_string"]) == (str(2**256 - 1), None)
    assert (second["value_string"], second["token_id_string"]) == (None, str(2**256 - 1))
    assert first["from_address"] == second["from_address"] == b"\xaa" * 20
    assert first["value_f64"] == 2.0**256


def test_transfers_of_ether_are_no_tokens_and_have_a_dataset_of_their_own() -> None:
    transfer = ([topic0(ERC20) or b"", ALICE, BOB], (5).to_bytes(32))
    logs = pa.concat_tables([table([transfer]), table([transfer], SYSTEM_ADDRESS)])
    [native] = read_config({"events": "native_transfers"}).events
    [token] = decoded(logs, ERC20)
    [ether] = decoded(logs, native)
    assert (token["address"], ether["address"]) == (CONTRACT, SYSTEM_ADDRESS)
    assert ether["value_string"] == "5"
    # The others aren't skipped either: nothing about them failed to decode.
    assert skipped(logs, ERC721) == [SkipReason.OTHER_LAYOUT]
    assert [row["address"] for row in decoded(logs, ERC20, native)] == [CONTRACT, SYSTEM_ADDRESS]
    # Whoever writes the signature gets every log that has it.
    by_hand = parse_signature("event Transfer(address indexed a, address indexed b, uint256 value)")
    assert len(decoded(logs, by_hand)) == 2


def test_transfers_of_ether_are_narrowed_to_their_address_where_they_are_stored() -> None:
    assert read_config({"events": "native_transfers"}).addresses == (SYSTEM_ADDRESS,)
    assert read_config({"events": ["native_transfers", "erc20_transfers"]}).addresses == ()


def test_of_two_layouts_with_as_many_topics_the_one_that_decodes_is_it() -> None:
    amount_indexed = parse_signature(
        "event Transfer(address indexed from, address to, uint256 indexed value)"
    )
    hash_ = topic0(ERC20) or b""
    large = (2**200).to_bytes(32, "big")
    logs = table([([hash_, ALICE, large], BOB), ([hash_, ALICE, BOB], large)])
    rows = decoded(logs, ERC20, amount_indexed)
    assert [row["to"] for row in rows] == [b"\xbb" * 20, None]
    assert [row["to_address"] for row in rows] == [None, b"\xbb" * 20]


def test_a_row_keeps_the_columns_of_its_log_and_clashing_names_get_something_behind_them() -> None:
    event = parse_signature(
        "event E(address address, uint256 value, bool value_string, bool Value, bool event)"
    )
    logs = table([log_of(event, [b"\1" * 20, 5, True, False, True])]).append_column(
        "timestamp", pa.array([7], pa.timestamp("us", tz="UTC"))
    )
    decoder = LogDecoder.of([event], [], logs.column_names)
    assert decoder.decode(logs).column_names == [
        *("block_number", "log_index", "address", "timestamp", "event"),
        *("address_param", *stored_integer("value", None)),
        *("value_string_param", "Value_param", "event_param", SKIPPED),
    ]


# Names that an engine has for itself, that only differ by case, that are missing, doubled, or longer than Postgres
# allows. Others can't be in an ABI: ``test_names_that_are_no_identifiers_are_refused``.
SURPRISING = (
    *(
        "__tracelake_skipped",
        "__tracelake_cell",
        "__filename",
        "__batch_index",
        "_metadata",
        "__TRACELAKE_SKIPPED",
    ),
    *(
        "ctid",
        "xmin",
        "XMAX",
        "tableoid",
        "rowid",
        "oid",
        "select",
        "order",
        "$",
        "_",
        "__",
        "skipped",
        "event",
    ),
    *(
        "topic0",
        "data",
        "block_number",
        "log_index",
        "a",
        "A",
        "a_param",
        "",
        "",
        "arg24",
        "a_binary",
        "a_hash",
    ),
    *("x" * 63, "x" * 64, "x" * 300, "x" * 63 + "y", "Ab" * 40),
)


@pytest.mark.parametrize("kind", ["bool", "uint256", "string indexed"])
def test_whatever_parameters_are_called_the_table_can_be_written_and_read(kind: str, tmp_path: Path) -> None:
    many = [f"event E{place}({kind} {name})" for place, name in enumerate(SURPRISING)]
    # A tuple's fields are no columns, and an event has room for three indexed parameters.
    if "indexed" not in kind:
        many.append(f"event All({', '.join(f'{kind} {name}' for name in SURPRISING)})")
    wanted = [parse_signature(each) for each in many]
    value = {"bool": True, "uint256": 7, "string indexed": "x"}[kind]
    logs = table([log_of(event, [value] * len(event.params)) for event in wanted])
    for hot in (True, False):
        decoder = LogDecoder.of(wanted, [], logs.column_names, hot=hot)
        rows, skips = decode_table(logs, decoder)
        assert (skips, rows.num_rows) == ({}, len(wanted))
        names = rows.column_names
        assert len({name.lower() for name in names}) == len(names)
        assert max(map(len, names)) <= MAX_NAME
        assert not {"ctid", "xmin", "xmax", "tableoid"} & {name.lower() for name in names}
        for row, event in zip(rows.sort_by("log_index").to_pylist(), wanted, strict=True):
            # Each parameter has a column of its own, a wide number several in files; one of them is null for a 7.
            parts = 5 if kind == "uint256" and not hot else 1
            given = [row[name] for name in names[names.index("event") + 1 :] if row[name] is not None]
            assert len(given) == parts * len(event.params)
    check_columns(names, [])
    pq.write_table(rows, tmp_path / "rows.parquet")
    assert pads.dataset(tmp_path / "rows.parquet").to_table().equals(rows)


def test_a_parameter_has_one_name_in_files_and_in_postgres() -> None:
    event = parse_signature(
        f"event E(uint256 xmin, bool {'x' * 80}, uint256 {'y' * 80}, bytes indexed {'z' * 80})"
    )
    hot, cold = (LogDecoder.of([event], [], SCHEMA.names, hot=hot).layout.columns for hot in (True, False))
    assert [column.name for column in hot] == [column.name for column in cold]
    assert [column.name for column in hot] == ["xmin_param", "x" * 63, "y" * 56, "z" * 58 + "_hash"]


def test_a_batch_costs_as_much_as_the_events_in_it_however_many_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = [
        parse_signature(f"event E{number}(address indexed who, uint64 amount)") for number in range(5_000)
    ]
    used = [known[4_999], known[17], ERC20]
    logs = table([log_of(event, [b"\1" * 20, 5]) for event in used[:2] * 20])
    logs = pa.concat_tables([logs, table([log_of(ERC20, [b"\1" * 20, b"\2" * 20, 5])])])
    calls: list[str] = []
    decode_one = decode_logs.decode_event

    def counted(event: AbiEvent, *given: Any) -> decode_logs.Decoded:
        calls.append(event.name)
        return decode_one(event, *given)

    monkeypatch.setattr(decode_logs, "decode_event", counted)
    decoder = LogDecoder.of([*known, ERC20], [], logs.column_names)
    [batch] = decoder.decode_batches(logs.combine_chunks().to_batches())
    assert sorted(calls) == ["E17", "E4999", "Transfer"]
    assert batch.num_rows == 41
    together = pa.Table.from_batches([batch])
    for each in used:
        alone, _ = decode_table(logs, LogDecoder.of([each], [], logs.column_names))
        own = together.filter(pc.equal(together["event"], each.name)).select(alone.column_names)
        assert own.combine_chunks().equals(alone.combine_chunks())


def test_a_table_of_several_events_shares_columns_of_the_same_name_and_form() -> None:
    deposit = parse_signature("event Deposit(address indexed user, uint256 amount)")
    withdraw = parse_signature("event Withdraw(address user, uint256 amount, string amount0)")
    logs = table([log_of(deposit, [b"\1" * 20, 5]), log_of(withdraw, [b"\2" * 20, 6, "why"])])
    rows = decoded(logs, deposit, withdraw)
    assert [(row["event"], row["user"][0], row["amount_string"], row["amount0"]) for row in rows] == [
        ("Deposit", 1, "5", None),
        ("Withdraw", 2, "6", "why"),
    ]


def test_an_anonymous_event_is_known_by_its_contract_and_its_number_of_topics() -> None:
    note = parse_signature("event LogNote(bytes4 indexed sig, address indexed usr, bytes data) anonymous")
    log = log_of(note, [b"\1\2\3\4", b"\5" * 20, b"hello"])
    stranger = ([topic0(ERC20) or b"", ALICE, BOB], bytes(32))
    logs = pa.concat_tables([table([log, stranger]), table([log], address=b"\x22" * 20)])
    [row] = decoded(logs, note, addresses=(CONTRACT,))
    assert (row["sig"], row["usr"], row["data"]) == (b"\1\2\3\4", b"\5" * 20, b"hello")


def test_hot_tables_get_one_column_per_number_and_text_that_postgres_takes() -> None:
    event = parse_signature("event E(int256 a, string s, string[] all, uint64 n)")
    sent = [-(2**255), "nul \0 \\u0000", ["\0", "\\u0000"], 2**64 - 1]
    logs = table([log_of(event, sent)])
    [row] = decoded(logs, event, hot=True)
    assert Decimal(row["a"]) == -(2**255)
    assert (row["s"], json.loads(row["all"])) == ("nul � \\u0000", ["�", "\\u0000"])
    assert row["n"] == str(2**64 - 1)
    types = LogDecoder.of([event], [], logs.column_names, hot=True).postgres_types
    assert types == {"a": "numeric(78,0)", "s": "text", "all": "jsonb", "n": "numeric(78,0)"}


def test_slices_and_other_binary_types_read_alike() -> None:
    logs = table([log_of(ERC20, [b"\1" * 20, b"\2" * 20, value]) for value in range(10)])
    decoder = LogDecoder.of([ERC20], [], logs.column_names)
    wide = logs.cast(
        pa.schema(
            [pa.field(f.name, pa.large_binary() if f.type == pa.binary() else f.type) for f in logs.schema]
        )
    )
    for source in (logs.slice(3, 4), wide.slice(3, 4)):
        assert decoder.decode(source)["value_string"].to_pylist() == ["3", "4", "5", "6"]
    assert decoder.decode(logs.slice(0, 0)).num_rows == 0
