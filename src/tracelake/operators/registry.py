"""The operators that a worker can run, by name.

Three sources: built-in ones, entry points of installed packages (group ``tracelake.operators``, name to
function), and the files or modules that the worker was told to load. Two functions under one name are an
error at start, whoever brought them: which one a job gets must not depend on the order of loading. A file that
can't be loaded is an error at start too, since somebody asked for it; an installed package that is broken only
fails the tasks that ask for its operators.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import cast

from tracelake.domain.errors import Invalid
from tracelake.operators.api import Operator, check_function, check_name, declared_name

ENTRY_POINTS = "tracelake.operators"

BUILT_IN: Mapping[str, str] = {
    "decode_events": "tracelake.operators.decode_events.operator:decode_events",
    "evm_ingest": "tracelake.operators.evm_ingest.operator:evm_ingest",
    "block_follower": "tracelake.operators.block_follower.operator:block_follower",
    "integrity_check": "tracelake.operators.integrity_check.operator:integrity_check",
    "noop": "tracelake.operators.noop:noop",
    "parquet_compact": "tracelake.operators.parquet_compact.operator:parquet_compact",
    "sql_transform": "tracelake.operators.sql_transform.operator:sql_transform",
}

Loader = Callable[[], object]


class Registry:
    def __init__(self) -> None:
        self._loaders: dict[str, tuple[str, Loader]] = {}
        self._loaded: dict[str, Operator] = {}

    @classmethod
    def standard(cls, sources: Iterable[str] = (), installed: Iterable[EntryPoint] | None = None) -> Registry:
        """What a worker starts with; ``sources`` are module names or paths of ``.py`` files."""
        registry = cls()
        for name, target in BUILT_IN.items():
            module, _, attribute = target.partition(":")
            registry._add(name, "tracelake", _attribute_of(module, attribute))
        for point in entry_points(group=ENTRY_POINTS) if installed is None else installed:
            package = point.dist.name if point.dist is not None else point.value
            registry._add(point.name, f"package {package}", point.load)
        for source in sources:
            registry.load(source)
        return registry

    @classmethod
    def of(cls, source: str) -> Registry:
        """The operators of one source and no others: what was loaded with it could be anything by now."""
        registry = cls()
        registry.load(source)
        return registry

    @property
    def names(self) -> list[str]:
        return sorted(self._loaders)

    @property
    def origins(self) -> dict[str, str]:
        """Who brought each operator, for people."""
        return {name: source for name, (source, _) in self._loaders.items()}

    def add(self, name: str, function: Operator, source: str) -> None:
        check_function(name, function)
        if name in self._loaded and self._loaded[name] is function:
            return
        self._add(name, source, lambda: function)
        self._loaded[name] = function

    def load(self, source: str) -> None:
        """Add every operator of a module or file."""
        module = _import(source)
        found = {id(value): value for value in vars(module).values() if declared_name(value) is not None}
        if not found:
            raise Invalid(
                "OperatorInvalid", f"{source} has no operator: mark a function with @operator(name)"
            )
        for function in found.values():
            self.add(str(declared_name(function)), function, source)

    def get(self, name: str) -> Operator:
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._loaders:
            near = difflib.get_close_matches(name, self.names, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(self.names)}"
            raise Invalid("UnknownOperator", f"this worker has no operator {name[:200]!r}{hint}")
        source, loader = self._loaders[name]
        try:
            function = loader()
        except Exception as error:
            raise _broken(f"operator {name!r} of {source}", error) from error
        check_function(name, function)
        if declared_name(function) not in (None, name):
            raise Invalid(
                "OperatorInvalid",
                f"{source} offers {name!r}, but the function is marked {declared_name(function)!r}",
            )
        self._loaded[name] = cast(Operator, function)
        return self._loaded[name]

    def _add(self, name: str, source: str, loader: Loader) -> None:
        check_name(name)
        if name in self._loaders:
            raise called_twice(name, self._loaders[name][0], source)
        self._loaders[name] = (source, loader)


def called_twice(name: str, first: str, second: str) -> Invalid:
    return Invalid("OperatorTwice", f"two operators are called {name!r}: one of {first}, one of {second}")


def _attribute_of(module: str, attribute: str) -> Loader:
    return lambda: getattr(importlib.import_module(module), attribute)


def _import(source: str) -> ModuleType:
    try:
        if source.endswith(".py"):
            return _import_file(Path(source))
        return importlib.import_module(source)
    except Invalid:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(source, error) from error


def _import_file(path: Path) -> ModuleType:
    """Under the file's own name, so that tracebacks and pickles say where the code is from."""
    if not path.is_file():
        raise Invalid("OperatorInvalid", f"there is no file {path}")
    known = sys.modules.get(path.stem)
    if known is not None and Path(known.__file__ or "").resolve() == path.resolve():
        return known
    if known is not None or path.stem in sys.stdlib_module_names:
        raise Invalid("OperatorInvalid", f"{path}: there is already a module {path.stem!r}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Invalid("OperatorInvalid", f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _broken(what: str, error: BaseException) -> Invalid:
    return Invalid("OperatorBroken", f"{what} can't be loaded: {type(error).__name__}: {error}")
