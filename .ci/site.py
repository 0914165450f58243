"""What the docs site has beside the pages of docs/: pages written from the code and its files.

Hooks of mkdocs (mkdocs.yml names this file). `api.md` comes from docstrings, `command_line.md` from
argparse, `formats.md` from the structs that files hold, `ops.md` from the rules. The README is the
first page; pages beside docs/ that others link to are part of the site. A link to another file of
the repository becomes the name of that file.
"""

from __future__ import annotations

import inspect
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md",
          "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md",
          "launch/README.md": "launch.md", "profiling/published/README.md": "published_rows.md"}
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)

FILES_SAY = """Written from the structs that files are read into. All files are JSON in UTF-8; a
field that is not listed, a number out of its range, NaN and a file that is too large are refused
by name.
A file has one of these: a plan (`autopar plan --out`), a cluster
([own cluster](guide/own_cluster.md)), what was measured (`autopar measure`), a timeline
(`autopar simulate --out`) or a history ([changing](guide/changing.md)). Checkpoints:
[save and load](guide/save_and_load.md#checkpoints)."""


# --- hooks ----------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    made = {site: (ROOT / own).read_text(encoding="utf-8") for own, site in BESIDE.items()}
    made |= {f"{name}.md": "\n".join(page()) for name, page in PAGES.items()}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    own = next((repo for repo, site in BESIDE.items() if site == uri), f"docs/{uri}")
    parts = FENCE.split(markdown)  # every other one is a block of code
    parts[::2] = [LINK.sub(lambda link: resolved(link, own, uri), text) for text in parts[::2]]
    return "".join(parts)


def resolved(link: re.Match[str], own: str, uri: str) -> str:
    """A link between files of the repository as one between pages of the site."""
    text, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or ":" in path:
        return link[0]
    repo = posixpath.normpath(posixpath.join(posixpath.dirname(own), path))
    site = BESIDE.get(repo, repo.removeprefix("docs/") if repo.startswith("docs/") else "")
    if not site:
        return text if repo in text else f"{text} (`{repo}`)"
    there = posixpath.relpath(site, posixpath.dirname(uri) or ".")
    return f"[{text}]({there}{'#' + anchor if anchor else ''})"


# --- pages from the code --------------------------------------------------------------------------


def api() -> Iterator[str]:
    import autopar_torch as ap
    from autopar_torch.run.model import ParallelModel
    from autopar_torch.search.best import Result
    from autopar_torch.search.space import Constraints
    from autopar_torch.timeline import Timeline

    yield "# Python API\n\nWritten from the docstrings, after `import autopar_torch as ap`.\n"
    for name in ap.__all__:
        yield from described(f"ap.{name}", getattr(ap, name))
    yield "# What calls return and take\n"
    for kind in (ParallelModel, Result, Constraints, Timeline):
        yield from described(kind.__name__, kind)


def described(name: str, thing: Any) -> Iterator[str]:
    """What it does; of data the fields, of a class its public methods."""
    noun = inspect.isclass(thing) and issubclass(thing, msgspec.Struct)
    yield f"## {name}\n"
    yield from () if noun else signature(name, thing)
    yield f"{inspect.getdoc(thing) or ''}\n"
    yield from fields(thing) if noun else ()
    if not inspect.isclass(thing) or name in ("ap.Cluster", "ap.AutoparError"):
        return
    for member, own in vars(thing).items():
        call = getattr(own, "__func__", own)
        if not member.startswith("_") and callable(call) and inspect.getdoc(call):
            yield from (f"### {name}.{member}\n", *signature(member, call),
                        f"{inspect.getdoc(call)}\n")


def fields(kind: Any) -> Iterator[str]:
    yield "| field | type | default |\n|---|---|---|"
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else f"`{default_of(field)!r}`"
        yield f"| `{field.name}` | {typed(field.type)} | {default} |"
    yield ""


def signature(name: str, thing: Any) -> Iterator[str]:
    try:
        own = inspect.signature(thing)
    except (TypeError, ValueError):  # written in C
        return
    args = [re.sub(r"(\w+\.)+(\w)", r"\2", str(arg).replace("'", ""))
            for arg in own.parameters.values() if arg.name != "self"]
    line = f"{name.removeprefix('ap.')}({', '.join(args)})"
    inside = ",\n    ".join(args)
    yield f"```python\n{line if len(line) < 90 else f'{name}({chr(10)}    {inside})'}\n```\n"


def command_line() -> Iterator[str]:
    from autopar_torch import cli

    os.environ["COLUMNS"] = "98"
    parser = cli.build_parser()
    yield ("# Command line\n\nWritten from `autopar --help`. [Commands](guide/commands.md) says "
           "what each is for, and what exit codes mean.\n")
    yield f"```text\n{parser.format_help().strip()}\n```\n"
    for name, verb in cli.subparsers(parser).items():
        yield f"## {name}\n\n```text\n{verb.format_help().strip()}\n```\n"


def formats() -> Iterator[str]:
    from autopar_torch.cluster import Cluster, Device, Link, Zone, ZoneLink
    from autopar_torch.find.measuring import Known
    from autopar_torch.history import History, Incident
    from autopar_torch.plan import Plan, Replica, Sharding, Stage
    from autopar_torch.profile import BlockCost, BlockCosts, Curve, Overheads, Profile
    from autopar_torch.search.space import Option
    from autopar_torch.timeline import Memory, Span, Timeline

    yield f"# File formats\n\n{FILES_SAY}\n"
    for kind in (Plan, Replica, Stage, Sharding, Cluster, Device, Link, Zone, ZoneLink, Known,
                 Option, Profile, BlockCosts, BlockCost, Curve, Overheads, Timeline, Span, Memory,
                 History, Incident):
        yield f"## {kind.__name__}\n\n{inspect.getdoc(kind) or ''}\n"
        yield from fields(kind)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory is not msgspec.NODEFAULT
    found = field.default_factory() if made else field.default
    return "left out" if found is msgspec.UNSET else found


def typed(kind: Any) -> str:
    """`int, 1 to 9`, `list of Stage`."""
    if get_origin(kind) is Annotated:
        base, *about = get_args(kind)
        meta = next((m for m in about if isinstance(m, msgspec.Meta)), msgspec.Meta())
        low, high = (f"{x:,}" if isinstance(x, int) else f"{x:g}" if x is not None else ""
                     for x in (meta.ge, meta.le))
        return f"{typed(base)}{f', {low} to {high}' if low or high else ''}"
    if (inside := get_args(kind)) and get_origin(kind) in (tuple, list):
        own = [typed(a) for a in inside if a is not Ellipsis]
        return f"list of {own[0]}" if Ellipsis in inside or len(own) == 1 else f"[{'; '.join(own)}]"
    if get_origin(kind) is dict:
        return f"object, {typed(inside[0])} to {typed(inside[1])}"
    if inside:
        words = [typed(a) if isinstance(a, type) or get_origin(a) else repr(a) for a in inside]
        return " or ".join(words).replace('"', "'")
    return getattr(kind, "__name__", str(kind)).replace("NoneType", "null")


def ops() -> Iterator[str]:
    from autopar_torch.shard import rules
    from autopar_torch.trace import discover

    found = json.loads(discover.FILE.read_text(encoding="utf-8"))
    named = sorted({*rules._RULES, *rules.VIEWS, *rules.PARTS})
    yield ("# Ops that tensor parallelism splits\n\nWritten from `shard/rules.py` and "
           "`shard/discovered.json`. [Any model](guide/models.md) says what becomes of others. "
           "Models: [coverage](coverage.md).\n\n"
           "**By a written rule**, beside every op that torch marks as pointwise:\n")
    yield ", ".join(f"`{name}`" for name in named) + ".\n"
    yield (f"**Found out by running them whole and in pieces** (torch {found['torch']}; others are "
           "tried while tracing):\n\n| op and its arguments | ways to split it |\n|---|---|")
    for key, op in sorted(found["ops"].items()):
        yield f"| `{key.replace('|', chr(92) + '|')}` | {len(op['factors'])} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "api": api, "command_line": command_line, "formats": formats, "ops": ops}
