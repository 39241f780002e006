"""The differences between two specs of one job, in words: ``config.range_size: 1000 -> 500``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from tracelake.domain.dag.fingerprint import canonical
from tracelake.domain.dag.model import DatasetName, InputSpec, JobOutput, JobSpec, OutputSpec

MAX_SHOWN = 80

_PRODUCT_FIELDS = (
    "activation",
    "source_kind",
    "operator",
    "execution_strategy",
    "update_strategy",
    "unique_key",
    "udf",
    "secrets",
)


def differences(old: JobSpec, new: JobSpec) -> Iterator[str]:
    """What changes a job's product, as far as its own spec tells."""
    for name in _PRODUCT_FIELDS:
        yield from _changed(name, _plain(getattr(old, name)), _plain(getattr(new, name)))
    yield from _changed("config", canonical(old.config), canonical(new.config))
    for index, (was, now) in enumerate(zip_longest(old.inputs, new.inputs)):
        yield from _input_changed(f"input {index}", was, now)
    for index, (out, after) in enumerate(zip_longest(old.outputs, new.outputs)):
        yield from _output_changed(f"output {index}", out, after)


def tuning_differences(old: JobSpec, new: JobSpec) -> tuple[str, ...]:
    """What changes only how a job is run."""
    found = list(_changed("runtime", old.runtime, new.runtime))
    before, after = _plain(old.settings), _plain(new.settings)
    for name in before:
        found += _changed(name, before[name], after[name])
    return tuple(found)


def _input_changed(label: str, was: InputSpec | None, now: InputSpec | None) -> Iterator[str]:
    if was is None or now is None:
        edge = was or now
        assert edge is not None
        yield f"{label}: {_source(edge)} {'added' if was is None else 'removed'}"
        return
    if was.source != now.source:
        yield f"{label}: {_source(was)} -> {_source(now)}"
    yield from _changed(f"{label}: trigger", was.trigger, now.trigger)
    if (was.where and was.where.tree) != (now.where and now.where.tree):
        yield f"{label}: where: {_where(was)} -> {_where(now)}"


def _output_changed(label: str, was: OutputSpec | None, now: OutputSpec | None) -> Iterator[str]:
    if was is None or now is None:
        output = was or now
        assert output is not None
        yield f"{label}: {output.name} {'added' if was is None else 'removed'}"
        return
    yield from _changed(f"{label}: name", was.name, now.name)
    yield from _changed(f"{label}: storage", was.storage.value, now.storage.value)


def _source(edge: InputSpec) -> str:
    match edge.source:
        case JobOutput(job, output):
            return f"{job}, output {output}"
        case DatasetName(dataset):
            return f"dataset {dataset}"


def _where(edge: InputSpec) -> str:
    return _shorten(edge.where.text) if edge.where is not None else "(none)"


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _changed(label: str, was: Any, now: Any) -> Iterator[str]:
    """Maps are compared key by key, everything else as a whole. True and 1 differ, as they do in JSON."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted({*was, *now}):
            yield from _changed(f"{label}.{key}", was.get(key, _ABSENT), now.get(key, _ABSENT))
    elif _show(was) != _show(now):
        yield f"{label}: {_shorten(_show(was))} -> {_shorten(_show(now))}"


_ABSENT = object()


def _show(value: Any) -> str:
    if value is _ABSENT or value is None:
        return "(none)"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
