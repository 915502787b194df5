"""Dependencies point down only, megatron-core is known in one place, and looking at files needs no torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "megaresume"

# From top to bottom: a module may import from its own layer and from those below it, never from one above.
LAYERS = (
    ("cli", "launch"),
    ("adapters",),
    ("manager", "one_call"),
    ("saver",),
    ("saving", "restoring", "run_objects", "journal", "status", "watch", "resume_request"),
    ("stop", "walltime", "job"),
    ("supervised", "outcome"),
    ("megatron", "progress"),
    ("state", "reshard", "data", "audit"),
    ("store",),
    ("topology", "errors"),
)
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}

# `data` asks for its default rank by one lazy call, so that a sampler can be built in one line inside a Megatron run.
EXCEPTION = ("data", "megatron")

MEGATRON = {"megatron", "transformer_engine", "apex"}


@dataclass(frozen=True)
class Import:
    """`importer` (a module of the package, dotted) asks for `target` at `line`; `lazy` inside a function."""

    importer: str
    target: str
    line: int
    lazy: bool
    only_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path))


def imports_of(path: Path) -> Iterator[Import]:
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text("utf-8"), str(path))
    yield from walk(tree, module, package, lazy=False, only_types=False)


def walk(node: ast.AST, module: str, package: str, *, lazy: bool, only_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in targets(child, package):
            yield Import(module, target, child.lineno, lazy, only_types)  # type: ignore[attr-defined]
        yield from walk(
            child,
            module,
            package,
            lazy=lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
            only_types=only_types or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"),
        )


def targets(node: ast.AST, package: str) -> list[str]:
    """The dotted names that an import statement, or an `import_module("...")`, asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{source}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        return [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    return []


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(dotted: str) -> str | None:
    """The part of the package that a dotted name lies in ("store", "manager"); None outside and for the package."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "megaresume" and len(parts) > 1 and parts[1] in rooms() else None


@cache
def rooms() -> frozenset[str]:
    return frozenset(path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()) - {
        "__init__",
        "__pycache__",
    }


def test_every_part_has_a_layer() -> None:
    with_python = {name for name in rooms() if not (PACKAGE / name).is_dir() or any((PACKAGE / name).rglob("*.py"))}
    assert with_python - DEPTH.keys() == set(), "give each new part its place in LAYERS"


def test_dependencies_point_down() -> None:
    upward = []
    for found in imports():
        here, there = room(found.importer), room(found.target)
        if here is None or there is None or (here, there) == EXCEPTION:
            continue
        if DEPTH[there] < DEPTH[here]:
            upward.append(str(found))
    assert upward == []


def test_the_one_exception_is_one_lazy_call() -> None:
    found = [each for each in imports() if (room(each.importer), room(each.target)) == EXCEPTION]
    assert len(found) <= 1, "\n".join(map(str, found))
    assert all(each.lazy for each in found)


def test_no_import_cycles() -> None:
    modules = {module_name(path) for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in imports():
        if found.lazy or found.only_types:
            continue
        target = found.target if found.target in modules else found.target.rpartition(".")[0]
        if target in modules and target != found.importer:
            graph[found.importer].add(target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_only_the_megatron_part_imports_megatron_core() -> None:
    strangers = [
        str(each) for each in imports() if each.target.split(".")[0] in MEGATRON and room(each.importer) != "megatron"
    ]
    assert strangers == []


def test_the_store_knows_torch_only_where_ranks_find_their_control_plane() -> None:
    users = {
        each.importer for each in imports() if each.target.split(".")[0] == "torch" and room(each.importer) == "store"
    }
    assert users <= {"megaresume.store.rendezvous"}


def test_x03_x04_nothing_that_executes_what_it_reads_is_imported() -> None:
    dangerous = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    assert [str(each) for each in imports() if each.target.split(".")[0] in dangerous] == []


@pytest.mark.parametrize(
    "statement",
    [
        "import megaresume",
        "import megaresume; dir(megaresume); megaresume.errors.MegaresumeError",
        "from megaresume import read_progress, Topology",
        "from megaresume import DataParallelBatchSampler; DataParallelBatchSampler.__init__",
    ],
)
def test_looking_needs_neither_torch_nor_megatron_core(statement: str) -> None:
    check = f"{statement}; import sys; print(*sorted({{'torch', 'megatron'}} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert ran.stdout.strip() == ""


def test_every_public_name_is_there() -> None:
    import megaresume

    for name in megaresume.__all__:
        assert getattr(megaresume, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'ResumeManger'.*ResumeManager"):
        megaresume.ResumeManger  # noqa: B018
