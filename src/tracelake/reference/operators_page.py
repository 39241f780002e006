"""The page of the built-in operators: facts from their catalog, words from the notes, rows from a run.

A test holds notes and catalog together: an operator or a setting without words is found, and so is an example that
a deploy would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import yaml

from tracelake.domain.operator_catalog import CATALOG, OperatorTraits, complete_config, config_problems
from tracelake.evm.raw_block import Dataset
from tracelake.reference import example_rows
from tracelake.reference.markdown import table
from tracelake.reference.operator_notes import NOTES, OperatorNotes
from tracelake.reference.sql_example import SQL_RESULT

_INTRODUCTION = f"""\
# Built-in operators

Made from the operator catalog by `python -m tracelake.reference`. An operator of your own may be called anything
that isn't listed here ([workers](workers.md#operators-of-your-own)); functions are in
[examples/functions](../examples/functions/README.md).

Rows on this page are real: the operators' own code made them from `tracelake devchain --seed {example_rows.SEED}
--blocks {example_rows.BLOCKS}`. Long values are cut (`…`), and only some columns are shown.

"""


def example_dag() -> str:
    return files(__package__).joinpath("every_operator.yaml").read_text(encoding="utf-8")


def operators_page() -> str:
    overview = [_overview(name) for name in NOTES]
    parts = [_INTRODUCTION + table(("operator", "runs on", "strategy", "writes"), overview)]
    parts.extend(_section(name) for name in NOTES)
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def settings_of(name: str) -> list[str]:
    """Required ones first, then in the words' own order."""
    required = dict(_required(name))
    return sorted(NOTES[name].settings, key=lambda key: key not in required)


def _overview(name: str) -> tuple[str, ...]:
    traits, notes = CATALOG[name], NOTES[name]
    runtimes = ", ".join(f"`{runtime}`" for runtime in notes.runtimes)
    return (f"[`{name}`](#{name})", runtimes, _strategy(name, traits), _storages(traits))


def _section(name: str) -> str:
    traits, notes = CATALOG[name], NOTES[name]
    parts = [f"## {name}\n", notes.about + "\n", _facts(name, traits, notes)]
    if notes.settings:
        parts.append(table(("config", "default", "meaning"), _settings(name)))
    if job := _jobs().get(name):
        parts.append(f"```yaml\n{job}```\n")
    parts.extend(_examples(name))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _facts(name: str, traits: OperatorTraits, notes: OperatorNotes) -> str:
    return table(
        ("", ""),
        [
            ("reads", notes.reads),
            ("writes", notes.writes),
            ("outputs", _outputs(traits)),
            ("storage", _storages(traits)),
            ("strategy", _strategy(name, traits)),
            ("runs on", ", ".join(f"`{runtime}`" for runtime in notes.runtimes)),
        ],
    )


def _settings(name: str) -> Iterator[tuple[str, str, str]]:
    defaults, required = complete_config(name, {}), dict(_required(name))
    for key in settings_of(name):
        default = "required" if key in required else f"`{defaults[key]}`" if key in defaults else ""
        yield f"`{key}`", default, NOTES[name].settings[key]


def _required(name: str) -> Iterator[tuple[str, str]]:
    if name == "sql_transform":
        yield "sql", "is required"
    for key, message in config_problems(name, complete_config(name, {})):
        if message.startswith("is required"):
            yield key, message


def _outputs(traits: OperatorTraits) -> str:
    if traits.outputs_named_after_inputs:
        return "as many as it has inputs to write, named after them"
    if traits.outputs is None:
        return "as many as the DAG says, 1 without a word"
    names = ", ".join(f"`{name}`" for name in traits.outputs)
    if traits.usual_outputs is not None:
        return f"{names}; the first {traits.usual_outputs} without a word, others by their names"
    return names


def _storages(traits: OperatorTraits) -> str:
    others = sorted(traits.storages - {traits.storage})
    return ", ".join([f"`{traits.storage}`", *(f"`{storage}`" for storage in others)])


def _strategy(name: str, traits: OperatorTraits) -> str:
    if NOTES[name].runtimes == ("sink",) or name == "block_follower":
        return "source, always on"
    needed = {"range_aggregator": "PerUpdate", "range_splitter": "PerPartition"}.get(name)
    return f"`{traits.strategy or needed}`" if traits.strategy or needed else "`PerUpdate`, `PerPartition`"


def _jobs() -> dict[str, str]:
    """The text of each example job, by its operator."""
    _, *entries = example_dag().split("\n  - ")
    texts = ["- " + entry.rstrip("\n").replace("\n    ", "\n  ") + "\n" for entry in entries]
    return {yaml.safe_load(text)[0]["operator"]: text for text in texts}


def _examples(name: str) -> Iterator[str]:
    match name:
        case "block_follower" | "evm_ingest":
            shown = list(Dataset)[:3] if name == "block_follower" else list(Dataset)[3:]
            for dataset in shown:
                yield _rows(f"`{dataset}`", example_rows.chain_rows(dataset))
        case "decode_events":
            yield _rows("`erc20_transfers`", example_rows.transfer_rows())
        case "sql_transform":
            yield _rows("The job above", SQL_RESULT)
        case "range_splitter":
            made = ", ".join(example_rows.chunks(950, 3100, 1000))
            yield f"Asked for blocks 950–3100, the job above announces {made}.\n"
        case "range_aggregator":
            made = ", ".join(example_rows.ranges(3200, 2999, 1000))
            yield f"With its input at block 3200 and 2999 finalized, the job above announces {made}.\n"
        case _:
            return


def _rows(title: str, example: example_rows.ExampleRows) -> str:
    more = f", and {example.left_out} more columns" if example.left_out else ""
    return f"{title}{more}:\n\n" + table(example.columns, example.rows)
