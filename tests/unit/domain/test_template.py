"""Templates of deliveries: values of a row in a text, and nothing that could run."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tracelake.delivery.targets import escape_for_slack
from tracelake.domain.errors import Invalid
from tracelake.domain.template import MAX_TEXT_CHARS, MAX_VALUE_CHARS, describe, parse_template, read_marked

ROW = {
    "severity": "critical",
    "payload": msgspec.Raw(
        b'{"msg": "big", "hits": [{"n": 7}], "none": null, "__class__": "text", "fee": 0.10,'
        b' "deep": [[true], "\\u00e4"]}'
    ),
    "huge": msgspec.Raw(b'{"n": 1' + b"0" * 5000 + b', "m": 123456789012345678.123456789012345678}'),
    "amount": Decimal("1e3"),
    "hash": b"\x00\xff",
    "at": datetime(2026, 1, 1, tzinfo=UTC),
    "ok": True,
    "gone": None,
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{severity}}: {{payload.msg}}", "critical: big"),
        ("{{ payload.hits.0.n }}{{gone}}{{payload.none}}{{payload.hits.9.n}}{{severity.upper}}", "7"),
        ("{{hash}} {{amount}} {{ok}} {{at}}", "0x00ff 1E+3 true 2026-01-01T00:00:00+00:00"),
        ("{{payload.hits}}", '[{"n": 7}]'),
        ("{{payload.__class__}} {{hash.hex}}", "text "),
        ("{{payload.fee}} {{payload.deep.0.0}} {{payload.deep.1}} {{payload.msg.x}}", "0.10 true ä "),
        ("{{huge.m}}", "123456789012345678.123456789012345678"),
        ("{{huge.n}}", "1" + "0" * 1999 + "…"),
        ("} {single} }} {% if x %}", "} {single} }} {% if x %}"),
        ("", ""),
    ],
)
def test_placeholders_become_values(template: str, text: str) -> None:
    assert read_marked(parse_template(template).render(ROW)) == text


@pytest.mark.parametrize(
    "template",
    [
        *(
            "{{severity",
            "{{}}",
            "{{ }}",
            "{{a b}}",
            "{{a|upper}}",
            "{{a()}}",
            "{{a[0]}}",
            "{{A}}",
            "{{.a}}",
            "{{a.}}",
        ),
        *("{{a.}}", "{{a..b}}", "{{{{a}}}}", "{{a" + ".b" * 11 + "}}", "{{x}}" * 101),
    ],
)
def test_anything_else_is_refused_with_its_place(template: str) -> None:
    with pytest.raises(Invalid, match="at character"):
        parse_template(template)


def test_json_is_opened_once_however_many_placeholders_lead_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    decode = msgspec.json.decode

    def counted(value: Any, **more: Any) -> Any:
        opened.append(len(bytes(value)))
        return decode(value, **more)

    monkeypatch.setattr(msgspec.json, "decode", counted)
    row = {"a": msgspec.Raw(b'{"l": [' + b"1, " * 50_000 + b'{"m": 2}]}')}
    template = "{{a.l.50000.m}}" + "".join(f"{{{{a.l.{place}}}}}" for place in range(99))
    assert read_marked(parse_template(template).render(row)) == "2" + "1" * 99
    assert len(opened) == 3


def test_size_is_bounded() -> None:
    long = read_marked(parse_template("{{severity}}" * 100).render({"severity": "x" * 10_000}))
    assert len(long) == MAX_TEXT_CHARS + 1
    one = read_marked(parse_template("{{severity}}").render({"severity": "x" * 10_000}))
    assert len(one) == MAX_VALUE_CHARS + 1


@pytest.mark.parametrize("begins", ["", "\ufdd1", "\ufdd0", "\ufdd1\ufdd0\ufdd1"])
def test_values_are_escaped_when_the_text_is_read_whatever_marks_they_bring(begins: str) -> None:
    made = parse_template("<b> {{severity}} \ufdd1<i>\ufdd0").render(
        {"severity": f"{begins}<!channel> & <http://x|y>\0"}
    )
    assert read_marked(made, escape_for_slack) == "<b> &lt;!channel&gt; &amp; &lt;http://x|y&gt; <i>"
    assert read_marked(made) == "<b> <!channel> & <http://x|y> <i>"


def test_a_value_that_is_cut_stays_escaped() -> None:
    for length in range(MAX_VALUE_CHARS - 12, MAX_VALUE_CHARS + 3):
        row = {"a": "x" * length + "<!channel>"}
        for template in ("{{a}}", "{{a}}" * 20):
            made = parse_template(template).render(row)
            assert "<" not in read_marked(made, escape_for_slack)
            assert {"\ufdd0", "\ufdd1"}.isdisjoint(read_marked(made))


def test_a_row_without_a_template_is_described_by_what_is_set() -> None:
    assert (
        describe('{"a": 1, "b": null, "c": "<", "d": {"e": [true]}}', "f") == 'f: a=1, c=<, d={"e": [true]}'
    )
    assert len(describe('{"a": "' + "x" * 5000 + '"}', "f")) < MAX_VALUE_CHARS
