"""Measures the structure of the source tree by its imports: the package graph, import cycles and the length of
files.

``make graph`` writes the result into ``docs/architecture.md`` between two markers; a test checks that the page is
up to date. ``python -m scripts.structure --tree DIR`` prints the figures of another checkout.

An import counts as lazy when it runs inside a function, and not at all when only a type checker reads it. A
fragment is a module of at most 60 lines that exactly one other module imports. A public name is that of a class or
of a type alias at the top of a module.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "tracelake"
PAGE = Path("docs/architecture.md")
BEGIN = "<!-- make graph: begin -->"
END = "<!-- make graph: end -->"
FRAGMENT_LINES = 60

BEFORE = (
    ("842", "727"),
    ("95,026", "77,559"),
    ("8.9", "9.4"),
    ("158", "155"),
    ("13.1%", "13.6%"),
    ("76", "81"),
    ("95", "73"),
    ("0", "0"),
    ("3", "3"),
)
"""The figures of commit 3f56c1f, before related files were merged: with the test support that the package held then
(``testing/``), and without it. In the order of ``_figure_lines``; printed by this module with ``--tree``."""

_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
"""Nodes with imports in them: an expression has none."""

Graph = Mapping[str, set[str]]


@dataclass
class Module:
    name: str
    lines: int
    header_lines: int
    """Lines of the docstring and of the imports."""
    public_names: list[str]
    loads: set[str] = field(default_factory=set)
    lazy: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Figures:
    files: int
    lines: int
    files_per_1000_lines: float
    weighted_median_lines: int
    header_share: float
    fragments: int
    repeated_public_names: int
    load_cycles: list[list[str]]
    lazy_cycles: list[list[str]]


def read_modules(tree: Path) -> dict[str, Module]:
    """Every module of the package, with what it imports of the package."""
    paths: dict[str, Path] = {}
    for path in sorted((tree / "src" / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(tree / "src").with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        paths[".".join(parts)] = path
    modules = {}
    for name, path in paths.items():
        source = path.read_text(encoding="utf-8")
        syntax, lines = ast.parse(source), len(source.splitlines())
        module = Module(name, lines, sum(_header_lines(syntax)), list(_public_names(syntax)))
        for target, is_lazy in _imports(syntax, lazy=False):
            found = _module_of(target, paths)
            if found is not None and found != name:
                (module.lazy if is_lazy else module.loads).add(found)
        modules[name] = module
    return modules


def _public_names(syntax: ast.Module) -> Iterator[str]:
    for statement in syntax.body:
        match statement:
            case ast.ClassDef(name=name):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_type(name, value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if _is_type(name, value):
                pass
            case _:
                continue
        if not name.startswith("_"):
            yield name


def _is_type(name: str, value: ast.expr | None) -> bool:
    """By its name, which is written like a class's. Type variables belong to their module alone."""
    is_variable = isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")
    return value is not None and name[0].isupper() and not name.isupper() and not is_variable


def _header_lines(syntax: ast.Module) -> Iterator[int]:
    for position, statement in enumerate(syntax.body):
        is_docstring = position == 0 and ast.get_docstring(syntax) is not None
        if is_docstring or isinstance(statement, ast.Import | ast.ImportFrom) or _is_type_checking(statement):
            yield (statement.end_lineno or statement.lineno) - statement.lineno + 1


def _is_type_checking(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Name)
        and statement.test.id == "TYPE_CHECKING"
    )


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            for alias in child.names:
                yield f"{child.module}.{alias.name}", lazy
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, lazy
        elif isinstance(child, _WITH_STATEMENTS):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, lazy=lazy or is_function)


def _module_of(target: str, known: Mapping[str, object]) -> str | None:
    """The module that an imported name belongs to: the name itself, or what stands before its last dot."""
    if target in known:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in known else None


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import one another, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def measure(modules: Mapping[str, Module]) -> Figures:
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for target in module.loads | module.lazy:
            importers[target].add(module.name)
    lines = sum(module.lines for module in modules.values())
    seen, median = 0, 0
    for module in sorted(modules.values(), key=lambda each: each.lines):
        seen += module.lines
        if seen * 2 >= lines:
            median = module.lines
            break
    names = Counter(name for module in modules.values() for name in module.public_names)
    return Figures(
        files=len(modules),
        lines=lines,
        files_per_1000_lines=round(1000 * len(modules) / lines, 1),
        weighted_median_lines=median,
        header_share=round(sum(module.header_lines for module in modules.values()) / lines, 3),
        fragments=sum(
            1 for module in modules.values()
            if 0 < module.lines <= FRAGMENT_LINES and len(importers[module.name]) == 1
        ),
        repeated_public_names=sum(1 for count in names.values() if count > 1),
        load_cycles=cycles({module.name: module.loads for module in modules.values()}),
        lazy_cycles=cycles({module.name: module.loads | module.lazy for module in modules.values()}),
    )  # fmt: skip


def package_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Which top-level package imports which, lazily or not. Modules at the root stand together as ``(root)``."""
    edges: dict[str, set[str]] = defaultdict(set)
    packages = {name.split(".")[1] for name in modules if name.count(".") >= 2}

    def package(name: str) -> str:
        parts = name.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in packages else "(root)"

    for module in modules.values():
        for target in module.loads | module.lazy:
            if package(module.name) != package(target):
                edges[package(module.name)].add(package(target))
        edges[package(module.name)] |= set()
    return edges


def reduce_graph(graph: Graph) -> dict[str, set[str]]:
    """Without edges that follow from others, so that a picture of it can be read."""

    def reach(node: str, without: str, seen: set[str]) -> set[str]:
        for target in graph.get(node, ()):
            if target not in seen and not (node == start and target == without):
                seen.add(target)
                reach(target, without, seen)
        return seen

    reduced: dict[str, set[str]] = {}
    for start, targets in graph.items():
        reduced[start] = {target for target in targets if target not in reach(start, target, set())}
    return reduced


def render(modules: Mapping[str, Module]) -> str:
    """The part of the page between the markers."""
    figures = measure(modules)
    graph = package_graph(modules)
    lines = ["```mermaid", "flowchart TD"]
    for source, targets in sorted(reduce_graph({k: v for k, v in graph.items() if k != "(root)"}).items()):
        lines += [f"    {source} --> {target}" for target in sorted(targets - {"(root)"})]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for module in modules.values():
        parts = module.name.split(".")
        package = parts[1] if len(parts) > 1 and parts[1] in graph else "(root)"
        sizes[package] += module.lines
        counts[package] += 1
    lines += ["```", "", "| package | files | lines | imports |", "|---|---:|---:|---|"]
    for package in sorted(graph):
        imports = ", ".join(sorted(graph[package] - {"(root)"})) or "nothing"
        lines.append(f"| {package} | {counts[package]} | {sizes[package]:,} | {imports} |")
    lines += ["", *_compared_with_before(_figure_lines(figures))]
    return "\n".join(lines)


def _compared_with_before(now: list[str]) -> list[str]:
    """The table of figures with two columns more."""
    lines = ["| figure | before, with `testing/` | before, without it | now |", "|---|---:|---:|---:|"]
    for line, (whole, without_testing) in zip(now[2:], BEFORE, strict=True):
        _, name, value, _ = line.split("|")
        lines.append(f"|{name}| {whole} | {without_testing} |{value}|")
    return lines


def _figure_lines(figures: Figures) -> list[str]:
    return [
        "| figure | now |",
        "|---|---:|",
        f"| files | {figures.files} |",
        f"| lines | {figures.lines:,} |",
        f"| files per 1,000 lines | {figures.files_per_1000_lines} |",
        f"| line-weighted median file, lines | {figures.weighted_median_lines} |",
        f"| share of lines in module docstrings and imports | {figures.header_share:.1%} |",
        f"| modules of at most {FRAGMENT_LINES} lines with one importer | {figures.fragments} |",
        f"| public names of classes and types that occur more than once | {figures.repeated_public_names} |",
        f"| import cycles at load | {len(figures.load_cycles)} |",
        f"| import cycles, lazy imports included | {len(figures.lazy_cycles)} |",
    ]


def with_graph(page: str, modules: Mapping[str, Module]) -> str:
    """The page with the part between its markers generated anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render(modules)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(), help="the checkout to read (default: this one)")
    parser.add_argument("--write", action="store_true", help=f"write the result into {PAGE}")
    parser.add_argument("--cycles", action="store_true", help="list the modules of each import cycle")
    options = parser.parse_args()
    modules = read_modules(options.tree)
    if options.write:
        page = options.tree / PAGE
        page.write_text(with_graph(page.read_text(encoding="utf-8"), modules), encoding="utf-8")
    print("\n".join(_figure_lines(measure(modules))))
    if options.cycles:
        for group in measure(modules).lazy_cycles:
            print(f"\ncycle of {len(group)}:", *group, sep="\n  ")


if __name__ == "__main__":
    main()
