"""The shape of the house: which room may use which, what no room may do, and what is told of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "autopar_torch"
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in SOURCES}
MOST_LINES = 450

NOUNS = {
    "model", "cluster", "profile", "plan", "timeline", "schedule", "proof", "guards", "errors",
    "files", "limits", "zones", "datasheets", "policy", "history", "progress", "units",
}
SHARD = NOUNS | {"shard"}
TRACE = SHARD | {"trace"}
MEASURE = TRACE | {"measure"}
SIMULATE = MEASURE | {"simulate"}
SEARCH = SIMULATE | {"search"}
REPORT = NOUNS | {"shard", "simulate", "search", "report"}
RUN = SEARCH | REPORT | {"run"}
FIND = RUN | {"find"}
API = FIND | {"api"}
MAY_IMPORT = dict.fromkeys(NOUNS, NOUNS) | {
    "shard": SHARD,
    "trace": TRACE,
    "measure": MEASURE,
    "simulate": SIMULATE,
    "search": SEARCH,
    "run": RUN,
    "find": FIND,
    "report": REPORT,
    "api": API,
    "__init__": API,
    "integrations": API | {"integrations"},
    "cli": API | {"cli", "__init__"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = [*sorted(NOUNS), "simulate", "search", "report", "shard.eliminate"]
MAY_PRINT = {"cli", "report"}

BLOCK_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is imported where torch must not be")

sys.meta_path.insert(0, NoTorch())
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("autopar_torch")]:
        del sys.modules[name]  # each on its own, whatever was imported before
    importlib.import_module(module)
"""


def room(path: Path) -> str:
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, name within the package) of everything that a file imports from it, at any depth."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == PACKAGE:
                yield node.lineno, name[1:]


def modules_imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, also for its types alone."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package[: len(package) - node.level + 1])
            base += f".{node.module}" if node.module else ""
            names = {f"{base}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= names or {base}
    return found


def room_of_name(name: list[str]) -> str:
    """`from autopar_torch import Plan` takes a public name, not a room."""
    folder = ROOT / PACKAGE
    known = name and ((folder / name[0]).is_dir() or (folder / f"{name[0]}.py").is_file())
    return name[0] if known else "__init__"


def places(path: Path, lines: Iterator[int]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}" for line in lines]


def test_no_import_runs_in_a_circle() -> None:
    imported = {name: modules_imported(path) - {name} for name, path in MODULES.items()}
    while free := {name for name, others in imported.items() if not others & set(imported)}:
        for name in free:
            del imported[name]
    assert not imported, f"these import each other: {sorted(imported)}"


def test_imports_run_one_way() -> None:
    wrong = []
    for path in SOURCES:
        assert room(path) in MAY_IMPORT, f"{path.name}: say in MAY_IMPORT what it may use"
        for line, used in ((n, room_of_name(name)) for n, name in imports(path)):
            if used not in MAY_IMPORT[room(path)]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room(path)} imports {used}")
    assert not wrong, "\n".join(wrong)


def torch_free_modules() -> list[str]:
    """Every module that must work where torch is not installed."""
    found = []
    for path in SOURCES:
        parts = list(path.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        if name in WITHOUT_TORCH or (parts and parts[0] in WITHOUT_TORCH):
            found.append(f"{PACKAGE}.{name}")
    return found


def test_planning_works_without_torch() -> None:
    command = [sys.executable, "-c", BLOCK_TORCH, *torch_free_modules()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / PACKAGE)))
def test_source_keeps_the_rules(path: Path) -> None:
    tree = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    asserts = (n.lineno for n in tree if isinstance(n, ast.Assert))
    assert not places(path, asserts), "asserts vanish under -O: raise an error of errors.py"
    silent = (n.lineno for n in tree if isinstance(n, ast.ExceptHandler) and says_nothing(n))
    assert not places(path, silent), "an error must not be swallowed without a word"
    prints = (n.lineno for n in tree if is_print(n) and room(path) not in MAY_PRINT)
    assert not places(path, prints), "only cli and report write to the terminal"


def test_no_file_is_longer_than_one_reads_at_once() -> None:
    long = [p.name for p in SOURCES if p.read_text(encoding="utf-8").count("\n") > MOST_LINES]
    assert not long, f"more than {MOST_LINES} lines: {long}"


def says_nothing(handler: ast.ExceptHandler) -> bool:
    return all(
        isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        for n in handler.body
    )


def names_of_types(path: Path) -> set[str]:
    """Classes that a file defines, and the CamelCase names of its aliases."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assigned = (t for n in body if isinstance(n, (ast.Assign, ast.AnnAssign))
                for t in (n.targets if isinstance(n, ast.Assign) else [n.target]))
    return {n.name for n in body if isinstance(n, ast.ClassDef)} | {
        t.id for t in assigned
        if isinstance(t, ast.Name) and t.id.lstrip("_")[:1].isupper() and not t.id.isupper()}


def test_no_type_has_the_name_of_another() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in names_of_types(path):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in found.items() if len(where) > 1}


def is_print(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


# --- what the docs say ----------------------------------------------------------------------------

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "launch").glob("*.md"),
         *(ROOT / "profiling").rglob("*.md")]


def files_imported(path: Path) -> set[Path]:
    """A name may be a module, a package, or something in either."""
    found = set()
    for _, name in imports(path):
        for parts in (name, name[:-1]):
            base = (ROOT / PACKAGE).joinpath(*parts)
            found |= {base.with_suffix(".py"), base / "__init__.py"}
    return found


@pytest.mark.parametrize(("which", "most"), [(0, 8), (1, 14)])
def test_the_way_from_parallelize_to_a_collective_is_as_told(which: int, most: int) -> None:
    """Each file of the list is imported by one that stands before it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = text.partition("## Follow parallelize()")[2].partition("\n## ")[0]
    lists = [re.findall(r"^\d+\. `(.+?)`", part, re.M) for part in told.split("Without a plan")]
    way = [ROOT / name for name in lists[which]]
    assert way[0].name == "api.py" and way[-1].name == "collectives.py" and len(way) <= most
    for place, path in enumerate(way[1:], 1):
        assert any(path in files_imported(before) for before in way[:place]), path


def test_the_glossary_explains_29_words_of_the_code() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    words = re.findall(r"^\| ([a-z -]+) \| ", text, re.M)[1:]
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES).lower().replace("_", "")
    assert len(words) == 29 and words == sorted(words)
    assert not [word for word in words if re.sub("[ -]", "", word) not in code]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    if page.name in ("CHANGELOG.md", "log.md"):
        return  # they tell of what was
    named = re.findall(r"`([a-z_/]+/[a-z_]+\.py|[a-z_]+/)`", text)
    assert not [n for n in named if not ((ROOT / n).exists() or (ROOT / PACKAGE / n).exists())]
