"""Rows of Postgres outputs: staged by the operator under its small role, committed by the wrapper's committer."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pytest

from tests.support.hot_scene import HotScene, Wrapper
from tests.support.operator_process import an_input, an_output
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.contracts.operator_protocol import CommitRows, StagedRows, StagedTable
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.table_layout import TableLayout
from tracelake.operators import Output
from tracelake.tables.data_database import DataDatabase

SOURCE = PayloadInput(0, UUID(int=1), UUID(int=2), 0, None, "none", trigger=False)
"""What a source has in place of an input: it commits as it goes."""


def blocks(*numbers: int) -> pa.Table:
    return pa.table({"block_number": pa.array(numbers, pa.int64())})


def test_staged_rows_are_committed_for_the_scope_when_the_operator_returns(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    rows = pa.table(
        {
            "block_number": [1, 2],
            "at": pa.array([0, None], pa.timestamp("us", "UTC")),
            "raw": [b"\x00\xff", None],
            "value": [str(2**256 - 1), "0"],
            "tags": [["a", "b\t\\"], []],
        }
    )
    assert ctx.outputs[0].stage(rows, types={"value": "numeric(78,0)"}) == 2
    [output], events = ctx.finish()
    assert (output.start, output.end, output.row_count, events) == (0, 9, 2, [])
    assert said(hot_scene) == []
    assert hot_scene.rows(ctx) == [
        (1, datetime(1970, 1, 1, tzinfo=UTC), b"\x00\xff", Decimal(2**256 - 1), ["a", "b\t\\"]),
        (2, None, None, Decimal(0), []),
    ]


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HARD_TEXT = 'a "quoted", line\r\n\\N \\. é'
NESTED = pa.struct([("n", pa.decimal128(5, 1)), ("at", pa.timestamp("us", "UTC"))])
KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["", None, HARD_TEXT]),
    "bytes": (pa.binary(), [b"", None, b"\x00\xff\n"]),
    "fixed": (pa.binary(2), [b"ab", None, b"\x00\x00"]),
    "flag": (pa.bool_(), [True, None, False]),
    "small": (pa.int16(), [-(2**15), None, 7]),
    "large": (pa.int64(), [2**63 - 1, None, -(2**63)]),
    "unsigned": (pa.uint32(), [2**32 - 1, None, 0]),
    "real": (pa.float64(), [0.1, None, -1e300]),
    "endless": (pa.float64(), [float("inf"), None, float("-inf")]),
    "exact": (pa.decimal128(20, 2), [Decimal("1.50"), None, Decimal("-9")]),
    "wide": (pa.decimal256(76, 0), [Decimal(10**75), None, Decimal(0)]),
    "day": (pa.date32(), [date(1, 1, 1), None, date(9999, 12, 31)]),
    "naive": (
        pa.timestamp("us"),
        [EPOCH.replace(microsecond=1, tzinfo=None), None, EPOCH.replace(tzinfo=None)],
    ),
    "nanos": (pa.timestamp("ns", "Asia/Tokyo"), [EPOCH.replace(microsecond=1), None, EPOCH]),
    "word": (pa.dictionary(pa.int8(), pa.string()), ["x", None, "y"]),
}
"""Names, types, and values that come back as they were."""
AS_JSON: dict[str, tuple[pa.DataType, list[Any], list[Any]]] = {
    "list": (pa.list_(pa.binary()), [[b"\x01", None], None, []], [["0x01", None], None, []]),
    "deep": (
        NESTED,
        [{"n": Decimal("1.5"), "at": EPOCH}, None, {"n": None, "at": None}],
        [{"n": "1.5", "at": "1970-01-01T00:00:00Z"}, None, {"n": None, "at": None}],
    ),
}


def test_values_of_every_kind_are_kept_as_they_are_also_in_slices_and_chunks(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    columns = {name: pa.array(values, kind) for name, (kind, values) in KINDS.items()}
    nested = {name: pa.array(values, kind) for name, (kind, values, _) in AS_JSON.items()}
    table = pa.table({"block_number": [1, 2, 3], **columns, **nested})
    twice = pa.concat_tables([table.slice(1), table.slice(0, 1)])
    assert ctx.outputs[0].stage(twice) == 3
    ctx.finish()
    found = dict(zip(table.column_names, zip(*hot_scene.rows(ctx), strict=True), strict=True))
    expected = {name: values for name, (_, values) in KINDS.items()}
    expected |= {name: values for name, (_, _, values) in AS_JSON.items()}
    assert {name: list(found[name]) for name in expected} == expected


def test_text_that_postgres_cannot_keep_is_refused_by_its_column(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    with pytest.raises(Invalid, match="column 'note': Postgres can't keep text with NUL characters"):
        ctx.outputs[0].stage(pa.table({"block_number": [1], "note": ["a\0b"]}))


def test_a_cursor_is_committed_together_with_its_event(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(after=0, upto=5))
    ctx.outputs[0].stage(blocks(1, 5))
    assert ctx.finish() == ([], [])
    assert [event.cursor for event in said(hot_scene)] == [5]
    assert hot_scene.rows(ctx) == [(1,), (5,)]


def test_a_source_commits_as_it_goes_into_one_staging_table_that_is_gone_at_the_end(
    hot_scene: HotScene,
) -> None:
    ctx = hot_scene.begin(SOURCE)
    output = ctx.outputs[0]
    for block in (1, 2, 3):
        output.stage(blocks(block))
        output.stage(blocks(block))
        assert ctx.commit([output], start=block, end=block, events=[output.event(cursor=block)]) == 2
        assert len(hot_scene.staging_tables()) == 1
    assert ctx.commit([output], start=2, end=2) == 0
    assert [event.cursor for event in said(hot_scene)] == [1, 2, 3]
    assert hot_scene.rows(ctx) == [(1,), (1,), (3,), (3,)]
    assert ctx.finish() == ([], [])
    ctx.close()
    assert hot_scene.staging_tables() == []


def test_an_empty_stage_makes_the_table_with_its_columns(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    assert ctx.outputs[0].stage(blocks()) == 0
    ctx.finish()
    assert hot_scene.rows(ctx) == []


def test_rows_that_were_staged_and_never_committed_are_the_operators_mistake(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(SOURCE)
    ctx.outputs[0].stage(blocks(1))
    with pytest.raises(Invalid, match="staged but not committed"):
        ctx.finish()


def test_a_commit_that_failed_can_be_tried_again_and_rows_staged_after_it_stand_alone(
    hot_scene: HotScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = hot_scene.begin(SOURCE)
    output = ctx.outputs[0]

    def fail(self: Wrapper, action: object) -> None:
        raise Unavailable("DataUnavailable", "the connection was cut")

    def commit_fails(block: int) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(Wrapper, "call", fail)
            with pytest.raises(Unavailable):
                ctx.commit([output], start=block, end=block)

    output.stage(blocks(1, 1))
    commit_fails(1)
    assert ctx.commit([output], start=1, end=1) == 2, "it still knows what was staged"
    output.stage(blocks(2, 2))
    commit_fails(2)
    output.stage(blocks(2))
    assert ctx.commit([output], start=2, end=2) == 1, "what the failed commit left isn't added"
    assert hot_scene.rows(ctx) == [(1,), (1,), (2,)]


def test_rows_of_other_columns_than_those_before_them_are_refused_or_get_a_new_table(
    hot_scene: HotScene,
) -> None:
    ctx = hot_scene.begin(SOURCE)
    output = ctx.outputs[0]
    output.stage(blocks(1))
    with pytest.raises(Invalid, match="other columns than those staged before"):
        output.stage(pa.table({"block_number": [1], "more": [1]}))
    ctx.commit([output], start=1, end=1)
    output.stage(pa.table({"block_number": [2], "more": [1]}))
    with pytest.raises(Invalid, match="other columns than the dataset: more"):
        ctx.commit([output], start=2, end=2)


@pytest.mark.parametrize(
    ("types", "why"),
    [
        ({"value": "money; drop table x"}, "is not a column type"),
        ({"other": "text"}, "columns that aren't there: other"),
        ({"value": "integer"}, "refuses the rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(hot_scene: HotScene, types: dict[str, str], why: str) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    with pytest.raises(Invalid, match=why):
        ctx.outputs[0].stage(pa.table({"block_number": [1], "value": ["x"]}), types=types)


def test_a_layout_that_cannot_be_is_refused(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    ctx.outputs[0].stage(blocks(1), layout=TableLayout(indexes=(("block_number",), ("hash",))))
    with pytest.raises(Invalid, match="no column to index: hash"):
        ctx.finish()
    for layout in ({"partition_blocks": 0}, {"indexes": ((),)}):
        with pytest.raises(Invalid):
            TableLayout(**layout)


def test_an_operator_can_only_have_its_own_staging_tables_committed(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(an_input(start=0, end=9))
    wrapper = hot_scene.wrapper
    assert wrapper is not None
    task, epoch = ctx.task.task_id.hex, ctx.task.epoch or 0
    for name in (
        f"staging_{uuid4().hex}_0_{epoch}_{0:08x}",
        f"staging_{task}_0_{epoch + 1}_{0:08x}",
        f"staging_{task}_1_{epoch}_{0:08x}",
        f"staging_{task}_0_{epoch}_{0:08x}\n",
        f"staging_{task}_0_{epoch}_{0:08x}_x",
        "fence",
    ):
        wish = CommitRows(
            outputs=[0], start=0, end=9, staged=[StagedRows(output_index=0, tables=[StagedTable(name, 1)])]
        )
        with pytest.raises(Invalid, match="isn't a staging table of this attempt"):
            wrapper.call(wish)


def test_a_data_database_that_is_away_is_worth_another_try() -> None:
    payload = an_output(storage="postgres", staging=f"postgres_table:staging_{uuid4().hex}_1_1_0")
    output = Output(payload, None, DataDatabase("postgresql://x:y@127.0.0.1:1/none"))
    with pytest.raises(Unavailable, match="can't be reached"):
        output.stage(pa.table({"a": [1]}))


def test_a_staging_connection_that_was_cut_is_opened_anew(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(SOURCE)
    output = ctx.outputs[0]
    output.stage(blocks(1))
    ctx.commit([output], start=1, end=1)
    cut_off(hot_scene)
    with pytest.raises(Unavailable):
        output.stage(blocks(2))
    output.stage(blocks(2))
    ctx.commit([output], start=2, end=2)
    assert hot_scene.rows(ctx) == [(1,), (2,)]


def test_after_a_load_that_failed_nothing_staged_before_it_is_committed_without_it(
    hot_scene: HotScene,
) -> None:
    ctx = hot_scene.begin(SOURCE)
    output = ctx.outputs[0]
    output.stage(blocks(1))
    cut_off(hot_scene)
    for _ in range(2):
        with pytest.raises(Unavailable):
            output.stage(blocks(2))
    with pytest.raises(Unavailable, match="discard what was staged"):
        ctx.commit([output], start=1, end=2)
    output.discard()
    output.stage(blocks(1, 2))
    ctx.commit([output], start=1, end=2)
    assert hot_scene.rows(ctx) == [(1,), (2,)]


def test_what_an_output_has_stored_is_read_back_as_of_now(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(SOURCE)
    output = ctx.outputs[0]
    assert output.stored(["block_number", "hash"], 0, 10).to_pydict() == {"block_number": [], "hash": []}
    for block in (3, 1, 2):
        row = pa.table({"block_number": [block], "hash": [bytes([block])], "n": [str(2**255)]})
        output.stage(row, types={"n": "numeric(78,0)"})
        ctx.commit([output], start=block, end=block)
    found = output.stored(["hash", "block_number", "n"], 2, 9)
    assert found.to_pydict() == {"hash": [b"\x02", b"\x03"], "block_number": [2, 3], "n": [str(2**255)] * 2}
    with pytest.raises(Invalid, match="there is no column gone"):
        output.stored(["gone"], 0, 1)


def said(scene: HotScene) -> list[Any]:
    assert scene.wrapper is not None
    return scene.wrapper.sent


def cut_off(scene: HotScene) -> None:
    """Everybody who stages loses the connection."""
    query = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE starts_with(usename, 'tracelake_t_') AND datname = current_database()"""
    with psycopg.connect(scene.dsn, autocommit=True) as admin:
        admin.execute(query)
