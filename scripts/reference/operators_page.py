"""The reference page of the built-in operators: facts and words from their declarations, rows from a run.

A test checks that every operator and every setting has words, and that a deploy accepts the examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

from scripts.reference import example_rows
from scripts.reference.example_rows import SQL_RESULT
from scripts.reference.markdown import table
from tracelake.domain.dag.model import Activation
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.operators.spec import Need, OperatorSpec
from tracelake.evm.raw_block import ChainTable

_INTRODUCTION = f"""\
# Built-in operators

Made from the operators' declarations by `python -m scripts.reference`. An operator of your own may
have any name that isn't listed here ([workers](workers.md#operators-of-your-own)); functions are in
[examples/functions](../examples/functions/README.md).

Rows on this page are real: the operators' own code made them from `tracelake devchain --seed {example_rows.SEED}
--blocks {example_rows.BLOCKS}`. Long values are cut (`…`), and only some columns are shown.

A deploy refuses settings that aren't listed (`noop` takes any), a runtime of the platform that the operator doesn't
run on, and a reactive operator as a source or the other way round. A setting *decides rows* if another value can
make other rows; the others only say how the operator runs, or how its rows are laid out. A change of either kind
gives the outputs a new version.

"""

_NEEDS = {Need.SPARK: "Spark", Need.RPC_POOL: "an [RPC pool](chains.md#rpc-pools)"}


def example_dag() -> str:
    return files(__package__).joinpath("every_operator.yaml").read_text(encoding="utf-8")


def operators_page() -> str:
    overview = [_overview(spec) for spec in CATALOG.values()]
    parts = [_INTRODUCTION + table(("operator", "runs on", "strategy", "writes"), overview)]
    parts.extend(_section(spec) for spec in CATALOG.values())
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _overview(spec: OperatorSpec[Any]) -> tuple[str, ...]:
    return (f"[`{spec.name}`](#{spec.name})", _runtimes(spec), _strategy(spec), _storages(spec))


def _section(spec: OperatorSpec[Any]) -> str:
    parts = [f"## {spec.name}\n", spec.about + "\n", _facts(spec)]
    if spec.settings:
        parts.append(table(("config", "default", "decides rows", "meaning"), _settings(spec)))
    if job := _jobs().get(spec.name):
        parts.append(f"```yaml\n{job}```\n")
    parts.extend(_examples(spec.name))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _facts(spec: OperatorSpec[Any]) -> str:
    return table(
        ("", ""),
        [
            ("reads", spec.reads),
            ("writes", spec.writes),
            ("outputs", _outputs(spec)),
            ("storage", _storages(spec)),
            ("strategy", _strategy(spec)),
            ("runs on", _runtimes(spec)),
            *([("needs", _needs(spec))] if spec.needs else []),
        ],
    )


def _needs(spec: OperatorSpec[Any]) -> str:
    return ", ".join(_NEEDS[need] for need in Need if need in spec.needs)


def _settings(spec: OperatorSpec[Any]) -> Iterator[tuple[str, str, str, str]]:
    """Required ones first, then in the order of the declaration."""
    required = {key for key, message in spec.problems(spec.complete({})) if message.startswith("is required")}
    required |= {field.name for field in spec.settings if field.is_required}
    for field in sorted(spec.settings, key=lambda field: field.name not in required):
        written = f"`{field.default}`" if field.written_default else ""
        default = "required" if field.name in required else written
        yield f"`{field.name}`", default, "yes" if field.setting.decides_rows else "", field.setting.about


def _runtimes(spec: OperatorSpec[Any]) -> str:
    return ", ".join(f"`{runtime}`" for runtime in spec.runtimes)


def _outputs(spec: OperatorSpec[Any]) -> str:
    if spec.outputs_named_after_inputs:
        return "as many as it has inputs to write, named after them"
    if spec.outputs is None:
        return "as many as the DAG lists, otherwise 1"
    names = ", ".join(f"`{name}`" for name in spec.outputs)
    if spec.usual_outputs is not None:
        return f"{names}; the first {spec.usual_outputs} unless the DAG lists others by their names"
    return names


def _storages(spec: OperatorSpec[Any]) -> str:
    others = sorted(spec.storages - {spec.storage})
    return ", ".join([f"`{spec.storage}`", *(f"`{storage}`" for storage in others)])


def _strategy(spec: OperatorSpec[Any]) -> str:
    if spec.activation is Activation.SOURCE:
        return "source, always on"
    made_for = spec.strategy or spec.usual_strategy
    return f"`{made_for}`" if made_for else "`PerUpdate`, `PerPartition`"


def _jobs() -> dict[str, str]:
    """The text of each example job, by its operator."""
    _, *entries = example_dag().split("\n  - ")
    texts = ["- " + entry.rstrip("\n").replace("\n    ", "\n  ") + "\n" for entry in entries]
    return {yaml.safe_load(text)[0]["operator"]: text for text in texts}


def _examples(name: str) -> Iterator[str]:
    match name:
        case "block_follower" | "evm_ingest":
            shown = list(ChainTable)[:3] if name == "block_follower" else list(ChainTable)[3:]
            for dataset in shown:
                yield _rows(f"`{dataset}`", example_rows.chain_rows(dataset))
        case "decode_events":
            yield _rows("`erc20_transfers`", example_rows.transfer_rows())
        case "sql_transform":
            yield _rows("The job above", SQL_RESULT)
        case "range_splitter":
            made = ", ".join(example_rows.chunks(950, 3100, 1000))
            yield (
                f"Asked for blocks 950–3100, the job above announces {made}. The ends of a request may cut a "
                "chunk. A cut one that lies within a chunk that was announced before isn't announced, since its "
                "blocks are there or on their way; one that overlaps others becomes one with them: after 0–299 a "
                "request for 0–10 announces nothing more, and after 3050–3150 one for 3100–3200 announces "
                "3050–3200. A chunk that can't be committed all the same, since two requests were split at "
                "once, fails without a retry (`PartitionOverlap`), and its error says what is there and what to "
                "ask for.\n"
            )
        case "range_aggregator":
            made = ", ".join(example_rows.ranges(3200, 2999, 1000))
            yield f"With its input at block 3200 and 2999 finalized, the job above announces {made}.\n"
        case _:
            return


def _rows(title: str, example: example_rows.ExampleRows) -> str:
    more = f", and {example.left_out} more columns" if example.left_out else ""
    return f"{title}{more}:\n\n" + table(example.columns, example.rows)
