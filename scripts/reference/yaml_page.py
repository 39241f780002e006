"""The page of a DAG file's fields, made of its JSON Schema and of one file that uses every field.

Types, defaults and meanings are the schema's, which a test compares with the parser; examples are the file's, which
a test parses. So a field that is added without an example, or an example that is no longer right, is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from scripts.reference.markdown import cell, table
from tracelake.domain.dag.entries import SETTINGS_FIELDS
from tracelake.domain.dag.schema import DURATION_FORMS, JsonSchema, json_schema

NAME = "NAME"
_LONGEST = 60
_INTRODUCTION = """\
# The DAG file

Made from the model by `python -m scripts.reference`. For editors the same is a JSON Schema:
[dag.schema.json](dag.schema.json), printed by `tracelake schema`. A deploy checks more than shapes (other jobs,
other DAGs, the installation) and reports everything at once, with line and field; `tracelake plan FILE` does so
without deploying. Unknown fields are refused; an empty field counts as absent.

A duration is a number of seconds, or a number with `s`, `m`, `h` or `d`. A list with one item may be written
without brackets.
Inputs, outputs and `config` of the built-in operators are on [their page](operators.md).

## Every field in one file

```yaml
{example}```
"""
_SECTIONS = (
    ("The file", "", "Top-level fields."),
    (
        "A job",
        "jobs[]",
        "Fields that determine the rows: a change gives its outputs, and all downstream, a new version"
        " (except `runtime`).",
    ),
    (
        "How a job is run",
        "jobs[]",
        "In a job, or in `defaults` for all jobs that don't set them. A change keeps versions and data.",
    ),
    ("Published datasets", f"publish.{NAME}", "Outputs under a name, and tables that jobs publish to."),
    ("Deliveries", "deliver[]", "Rows that are [sent to receivers](deliveries.md)."),
)


@dataclass(frozen=True, slots=True)
class Field:
    path: str
    schema: JsonSchema
    required: bool


def example_text() -> str:
    return files(__package__).joinpath("every_field.yaml").read_text(encoding="utf-8")


def yaml_page() -> str:
    example = yaml.safe_load(example_text())
    found = list(fields(json_schema()))
    parts = [_INTRODUCTION.format(example=example_text())]
    for (title, prefix, about), section in zip(_SECTIONS, _sections(found), strict=True):
        rows = [_row(field, prefix, example) for field in section]
        parts.append(f"## {title}\n\n{about}\n\n")
        parts.append(table(("field", "type", "default", "meaning", "example"), rows))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def fields(schema: JsonSchema, path: str = "", *, required: bool = False) -> Iterator[Field]:
    """Every field below, each before its parts; ``[]`` stands for an item, ``NAME`` for any key."""
    if path and not path.endswith(("[]", NAME)):
        yield Field(path, schema, required)
    seen: set[str] = set()
    for form in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        for name, inner in form.get("properties", {}).items():
            at = f"{path}.{name}".lstrip(".")
            if at not in seen:
                seen.add(at)
                everywhere = name in form.get("required", ()) and form is schema
                yield from fields(inner, at, required=everywhere)
        if isinstance(form.get("items"), dict) and form["items"].get("properties"):
            yield from fields(form["items"], f"{path}[]")
        if isinstance(values := form.get("additionalProperties"), dict) and values.get("oneOf"):
            yield from fields(values, f"{path}.{NAME}")


def example_of(field: Field, example: Any) -> Any:
    """The first value in the file that stands at this place; None if there is none."""
    return next(_at(example, field.path.replace("[]", ".[]").split(".")), None)


def _sections(found: list[Field]) -> tuple[list[Field], ...]:
    def is_setting(field: Field) -> bool:
        return field.path.split(".")[1:2] != [] and field.path.split(".")[1] in SETTINGS_FIELDS

    jobs = [field for field in found if field.path.startswith("jobs[]")]
    return (
        [field for field in found if "." not in field.path or field.path == "defaults.runtime"],
        [field for field in jobs if not is_setting(field)],
        [field for field in jobs if is_setting(field)],
        [field for field in found if field.path.startswith("publish.")],
        [field for field in found if field.path.startswith("deliver[]")],
    )


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    match path:
        case []:
            yield value
        case ["[]", *rest]:
            for item in value if isinstance(value, list) else ():
                yield from _at(item, rest)
        case [step, *rest] if step == NAME:
            for item in value.values() if isinstance(value, dict) else ():
                yield from _at(item, rest)
        case [step, *rest] if isinstance(value, dict) and step in value:
            yield from _at(value[step], rest)
        case _:
            return


def _row(field: Field, prefix: str, example: Any) -> tuple[str, ...]:
    name = field.path.removeprefix(prefix).lstrip(".")
    default = "required" if field.required else _default(field.schema)
    text = "" if _has_parts(field.schema) else _inline(example_of(field, example))
    if len(text) > _LONGEST:
        text = text[: _LONGEST // 2] + "…"
    meaning = cell(field.schema["description"].removesuffix(DURATION_FORMS))
    return (f"`{name}`", _type(field.schema), default, meaning, text and f"`{text}`")


def _has_parts(schema: JsonSchema) -> bool:
    """Its fields have rows of their own."""
    below = (schema.get("items"), schema.get("additionalProperties"), schema)
    inner = [form for form in below if isinstance(form, dict)]
    return any(form.get("properties") or form.get("oneOf") for form in inner)


def _default(schema: JsonSchema) -> str:
    if "default" not in schema:
        return ""
    return f"`{_inline(schema['default'])}`"


def _type(schema: JsonSchema) -> str:
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if forms := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        return " or ".join(dict.fromkeys(_form(form, forms) for form in forms))
    return _form(schema, [])


def _form(schema: JsonSchema, beside: list[JsonSchema]) -> str:
    kind = schema.get("type")
    match next(name for name in ([kind] if isinstance(kind, str) else kind or []) if name != "null"):
        case "integer" if any("[smhd]" in form.get("pattern", "") for form in beside):
            return "duration"
        case "string" if "[smhd]" in schema.get("pattern", ""):
            return "duration"
        case "string" if "pattern" in schema:
            return f"name, `{schema['pattern']}`"
        case "string":
            return "text"
        case "boolean":
            return "`true`, `false`"
        case "array":
            return "list of texts" if schema["items"].get("type") == "string" else "list"
        case "integer":
            return _range(schema)
        case _ if "enum" in (values := schema.get("additionalProperties") or {}):
            return "map of names to " + ", ".join(f"`{value}`" for value in values["enum"])
        case _:
            return "map"


def _range(schema: JsonSchema) -> str:
    low, high = schema["minimum"], schema["maximum"]
    return f"whole number, {low} or more" if high >= 10**9 else f"whole number, {low} to {high}"


def _inline(value: Any) -> str:
    if value is None:
        return ""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()
