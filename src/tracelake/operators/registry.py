"""``@operator`` and ``Registry``: the operators that a worker can run, by name.

The decorator returns the function as it is, only marked: nothing is registered on import, so a module can be
imported any number of times, tests included, and the worker alone decides what it offers.

There are three sources: built-in operators, entry points of installed packages (group ``tracelake.operators``,
name to function), and the files or modules that the worker is to load. Two functions under one name are an error
at start, wherever they come from: which one a job gets must not depend on the order of loading. A file that can't
be loaded is an error at start too, since it was asked for; a broken installed package only fails the tasks that
need its operators.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import msgspec

from tracelake.domain.errors import Invalid
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.operators.spec import OperatorSpec

if TYPE_CHECKING:
    from tracelake.operators.context import Context

Operator: TypeAlias = "Callable[[Context], None]"
F = TypeVar("F", bound="Callable[[Context], None]")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}")
_MARK = "__tracelake_operator__"
_SPEC = "__tracelake_spec__"
ENTRY_POINTS = "tracelake.operators"
BUILT_IN: Mapping[str, str] = {
    spec.name: spec.function for spec in CATALOG.values() if spec.function is not None
}
Loader = Callable[[], object]


def operator(name: str, *, spec: OperatorSpec[Any] | None = None) -> Callable[[F], F]:
    """Mark a function ``(ctx) -> None`` as the operator ``name``. With a ``spec``, a worker checks the config of
    each task against it before it calls the function."""
    check_name(name)
    if spec is not None:
        check_spec(name, spec)

    def mark(function: F) -> F:
        check_function(name, function)
        setattr(function, _MARK, name)
        setattr(function, _SPEC, spec)
        return function

    return mark


def declared_name(candidate: object) -> str | None:
    """The name under which a function was marked, if it was."""
    name = getattr(candidate, _MARK, None) if inspect.isfunction(candidate) else None
    return name if isinstance(name, str) else None


def declared_spec(candidate: object) -> OperatorSpec[Any] | None:
    """The declaration that a function was marked with, if it was."""
    spec = getattr(candidate, _SPEC, None)
    return spec if isinstance(spec, OperatorSpec) else None


def check_spec(name: str, spec: object) -> None:
    if not isinstance(spec, OperatorSpec):
        raise Invalid("OperatorInvalid", f"the spec of operator {name!r} is no OperatorSpec")
    if spec.name != name:
        raise Invalid("OperatorInvalid", f"operator {name!r} has the spec of {spec.name!r}")
    if not (isinstance(spec.config, type) and issubclass(spec.config, msgspec.Struct)):
        raise Invalid("OperatorInvalid", f"the config of operator {name!r} is no msgspec.Struct")
    try:
        wrong = {field.name: field.problem(field.default) for field in spec.settings if field.written_default}
    except (TypeError, NameError) as error:
        raise Invalid("OperatorInvalid", f"the config of operator {name!r} can't be read: {error}") from None
    for key, problem in wrong.items():
        if problem is not None:
            raise Invalid("OperatorInvalid", f"operator {name!r}: the default of {key}: {problem}")


def check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            "OperatorInvalid",
            f"{name!r} is no name for an operator: lower case letters, digits and _, a letter first",
        )


def check_function(name: str, function: object) -> None:
    """Refuse a function that would do nothing when it is called: a coroutine or a generator never runs its body."""
    if not callable(function):
        raise Invalid("OperatorInvalid", f"operator {name!r} is not a function but {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise Invalid(
            "OperatorInvalid", f"operator {name!r} is async: use asyncio.run() inside of a function"
        )
    if inspect.isgeneratorfunction(function):
        raise Invalid("OperatorInvalid", f"operator {name!r} is a generator: call ctx.emit instead of yield")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise Invalid(
            "OperatorInvalid", f"operator {name!r} must take one argument, the context: def {name}(ctx)"
        ) from None
    except ValueError:
        # Some callables of C code have no signature to look at.
        return


class Registry:
    def __init__(self) -> None:
        self._loaders: dict[str, tuple[str, Loader]] = {}
        self._loaded: dict[str, Operator] = {}

    @classmethod
    def standard(cls, sources: Iterable[str] = (), installed: Iterable[EntryPoint] | None = None) -> Registry:
        """The registry of a worker; ``sources`` are module names or paths of ``.py`` files."""
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
        """The operators of one source and no others: loading it may have changed any of them."""
        registry = cls()
        registry.load(source)
        return registry

    @property
    def names(self) -> list[str]:
        return sorted(self._loaders)

    @property
    def origins(self) -> dict[str, str]:
        """The source of each operator, for messages."""
        return {name: source for name, (source, _) in self._loaders.items()}

    def add(self, name: str, function: Operator, source: str) -> None:
        check_function(name, function)
        # A file that imports an operator of another file has it among its own names.
        if name in self._loaded and self._loaded[name] is function:
            return
        self._add(name, source, lambda: function)
        self._loaded[name] = function

    def load(self, source: str) -> None:
        """Add every operator of a module or file."""
        module = _import(source)
        # By identity: a module may have several names for one function.
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
            own = "one of your own comes with tracelake worker --operators FILE"
            raise Invalid("UnknownOperator", f"this worker has no operator {name[:200]!r}{hint}; {own}")
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
    # A file that calls ``sys.exit`` must not end the worker.
    except (Exception, SystemExit) as error:
        raise _broken(source, error) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file under its own name, so that tracebacks and pickles show where the code is from."""
    if not path.is_file():
        raise Invalid("OperatorInvalid", f"there is no file {path}")
    known = sys.modules.get(path.stem)
    if known is not None and Path(known.__file__ or "").resolve() == path.resolve():
        return known
    # A file called json.py would replace Python's own module for all code in the process.
    if known is not None or path.stem in sys.stdlib_module_names:
        raise Invalid("OperatorInvalid", f"{path}: there is already a module {path.stem!r}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Invalid("OperatorInvalid", f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs, as Python's import does: dataclasses and pickles look their module up.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A module that is loaded in part must not be found by the next import.
        del sys.modules[path.stem]
        raise
    return module


def _broken(what: str, error: BaseException) -> Invalid:
    return Invalid("OperatorBroken", f"{what} can't be loaded: {type(error).__name__}: {error}")
