"""Code lines of the package by folder, without blank lines, comments and docstrings.

Ends with status 1 where they are more than .ci/budget says; only a commit of its own raises that.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "autopar_torch"
IDLE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER}
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str, tree: ast.Module) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    used = {line for token in tokens if token.type not in IDLE
            for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            used -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return used


def main() -> int:
    folders: Counter[str] = Counter()
    functions: list[int] = []
    longest = ("", 0)
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        parts = path.relative_to(PACKAGE).parts
        folders[parts[0] if len(parts) > 1 else "."] += len(code_lines(text, tree))
        functions += [(n.end_lineno or n.lineno) - n.lineno + 1 for n in ast.walk(tree)
                      if isinstance(n, SCOPES[2:])]
        longest = max(longest, (str(path.relative_to(PACKAGE)), text.count("\n")),
                      key=lambda found: found[1])
    total, budget = sum(folders.values()), int((HERE / "budget").read_text())
    for folder, lines in folders.most_common():
        print(f"{folder:>10} {lines:6}")
    print(f"{'all':>10} {total:6} of {budget}")
    tenth = statistics.quantiles(functions, n=10)[-1]
    print(f"functions: median {statistics.median(functions):.0f} lines, nine of ten at most "
          f"{tenth:.0f}; longest file {longest[0]} with {longest[1]}")
    return int(total > budget)


if __name__ == "__main__":
    sys.exit(main())
