"""``OperatorSpec``: what the platform knows of an operator, declared once.

Deploy checks, the reference page, the JSON Schema of DAG files, the worker's preload and the operator itself read
the same declaration, so a deploy refuses what the operator would refuse. Operators outside of this package may
declare one as well: ``@operator("name", spec=OperatorSpec("name", config=MySettings))``.

The settings are a ``msgspec.Struct``. Types and bounds are msgspec's; an ``Annotated`` type carries a ``Setting``
with the meaning of the field and the text of the error message:

    class MySettings(msgspec.Struct, frozen=True, kw_only=True):
        depth: Annotated[int, msgspec.Meta(ge=1), Setting("Blocks to look back.", must="a number of blocks")] = 10

A field without a default is required. One with a default of ``None`` or ``UNSET`` is left out of a job's completed
config when the DAG leaves it out; any other default is written out there, so that spelling it out changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_args

import msgspec

from tracelake.domain import runtimes
from tracelake.domain.dag.model import Activation, ExecutionStrategy, Storage
from tracelake.domain.errors import Invalid

C = TypeVar("C", bound=msgspec.Struct)
ConfigProblems = Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]]
_ANY_STORAGE = frozenset(Storage)


class Need(StrEnum):
    """The needs of an operator that its worker must meet."""

    SPARK = "spark"
    RPC_POOL = "rpc_pool"


@dataclass(frozen=True, slots=True)
class Setting:
    """The meaning of a setting, in Markdown. ``must`` completes "must be …"; without it msgspec's own message is
    used. ``decides_rows`` is False when the setting only says how the operator runs, or how its rows are laid out:
    the reference page marks it. It is part of a job's fingerprint all the same."""

    about: str
    must: str = ""
    decides_rows: bool = True
    required: str = "is required"


@dataclass(frozen=True, slots=True)
class FileSetting:
    """A setting that may name files of the DAG's folder: ``{key: path}``, or a list with such entries. The client
    reads them and writes their content in place of the paths, so that a deployed version is whole and immutable.

    ``read`` turns the content of a file into that; it raises ``ValueError`` with a message for people."""

    setting: str
    key: str
    read: Callable[[bytes], list[str]]


class NoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The config of an operator that has no settings."""


@dataclass(frozen=True, slots=True)
class SettingField:
    """One field of a config model."""

    name: str
    type: Any
    default: Any
    setting: Setting

    @property
    def is_required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def written_default(self) -> bool:
        # None and UNSET mean "left out": writing them into configs would change the fingerprints of existing jobs.
        return self.default not in (msgspec.NODEFAULT, None, msgspec.UNSET)

    def problem(self, value: object) -> str | None:
        """The message about a value that the field's type refuses."""
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            return f"must be {self.setting.must}" if self.setting.must else str(error)
        return None


@dataclass(frozen=True, slots=True)
class OperatorSpec(Generic[C]):
    name: str
    config: type[C]
    about: str = ""
    reads: str = ""
    writes: str = ""
    runtimes: tuple[str, ...] = ()
    """Runtimes that it can run on; empty: any that a worker serves. A deploy refuses the other built-in ones."""
    needs: frozenset[Need] = frozenset()
    function: str | None = None
    """For built-in operators: ``module:function`` in a worker. None: no worker runs it."""
    outputs: tuple[str, ...] | None = None
    """None: as many as the DAG asks for."""
    storage: Storage = Storage.NONE
    storages: frozenset[Storage] = _ANY_STORAGE
    activation: Activation | None = None
    """The only activation that it runs with; a deploy refuses the other one. None: either."""
    strategy: ExecutionStrategy | None = None
    """The only strategy that it runs with; a deploy refuses others."""
    usual_strategy: ExecutionStrategy | None = None
    """The strategy that it is made for; it refuses scopes of the other one when it runs."""
    outputs_named_after_inputs: bool = False
    outputs_by_name: bool = False
    """An output's content follows from its name, which is one of ``outputs``."""
    usual_outputs: int | None = None
    """Number of outputs of a job that doesn't list any; None is all of them."""
    chain_tables: bool = False
    """Outputs have the columns of the chain tables that they are named after."""
    reads_blocks: bool = False
    """Works on its inputs by block number."""
    reports_chain_progress: bool = False
    """Reports in its progress how far its tables are behind the head of a chain."""
    invalidates_inputs: bool = False
    """May invalidate ranges of its inputs. Other operators may send events about their own outputs only."""
    platform: bool = False
    """A deploy adds its jobs by itself; no DAG names it."""
    refuses_unknown: bool = True
    """False: a deploy leaves settings that the model doesn't have to the operator."""
    files: tuple[FileSetting, ...] = ()
    checks: ConfigProblems | None = None
    """Replaces the check of each setting by its type, where settings depend on each other."""

    @property
    def in_process(self) -> bool:
        """Whether the Dispatcher can run it itself."""
        return runtimes.DISPATCHER in self.runtimes

    @property
    def settings(self) -> tuple[SettingField, ...]:
        return setting_fields(self.config)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(field.name for field in self.settings)

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults that a job's config is completed with."""
        return {field.name: field.default for field in self.settings if field.written_default}

    @property
    def output_count(self) -> int:
        """Number of outputs of a job that doesn't list any."""
        if self.usual_outputs is not None:
            return self.usual_outputs
        return 1 if self.outputs is None else len(self.outputs)

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with defaults written out, so that spelling one out is no change of the job."""
        return {**self.defaults, **config}

    def problems(self, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Pairs of setting and message; unknown settings aside."""
        return self.checks(config) if self.checks is not None else model_problems(self.config, config)

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse a config with everything that is wrong with it. A deploy refuses the same, but a job may have been
        deployed by an older version."""
        unknown = sorted(set(config) - self.keys) if self.refuses_unknown else []
        wrong = [(key, f"{self.name} has no such setting") for key in unknown]
        wrong += self.problems(config)
        if wrong:
            raise Invalid("InvalidConfig", "; ".join(f"config: {key}: {message}" for key, message in wrong))

    def read(self, config: Mapping[str, Any]) -> C:
        """The checked config as the operator uses it."""
        self.check(config)
        return msgspec.convert(dict(config), self.config)


def setting_fields(model: type[msgspec.Struct]) -> tuple[SettingField, ...]:
    """The fields of a config model, in their order."""
    return tuple(
        SettingField(field.name, field.type, _default(field), _setting(field.type))
        for field in msgspec.structs.fields(model)
    )


def model_problems(
    model: type[msgspec.Struct], config: Mapping[str, Any], *, but: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Settings that are missing or that their type refuses. ``None`` counts as missing if there is no default.
    Settings of ``but`` are left to a check of the operator's own."""
    for field in setting_fields(model):
        if field.name in but:
            continue
        value = config.get(field.name)
        if field.is_required and value is None:
            yield field.name, field.setting.required
        # Defaults needn't be checked again: a test does so for built-in operators, registration for others.
        elif field.name in config and (wrong := field.problem(value)) is not None:
            yield field.name, wrong


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _setting(annotated: Any) -> Setting:
    return next((meta for meta in get_args(annotated) if isinstance(meta, Setting)), Setting(""))
