"""Tables and reference in the Markdown of docs/, so that its pages read without a build.

    python -m paper.pages

writes what stands between `<!-- table: results/X -->`, `<!-- reference: NAME -->` or `<!-- modules: NAME ... -->` and
the next `<!-- end -->`. A test holds the pages to it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PART = re.compile(r"<!-- (table|reference|modules): (.*?) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 100


def written(text: str) -> str:
    """The text of a page with its generated parts made anew."""
    makers = {"table": table, "reference": reference, "modules": modules}

    def part(found: re.Match[str]) -> str:
        kind, what = found.groups()
        return f"<!-- {kind}: {what} -->\n\n{makers[kind](what)}\n\n<!-- end -->"

    return PART.sub(part, text)


def table(path: str) -> str:
    """A file of results, headings one level down."""
    return (ROOT / path).read_text(encoding="utf-8").strip()


def modules(names: str) -> str:
    """A table of modules with the first line of their docstrings."""
    lines = [f"| `{name}` | {_first(import_module(name))} |" for name in names.split()]
    return "\n".join(["| module | |", "|---|---|", *lines])


def reference(name: str) -> str:
    """Signature and docstring of a public name, and of a class its public methods and properties."""
    home, _, last = name.rpartition(".")
    value: Any = getattr(import_module(home), last)
    parts = [f"### {name}", _signature(last, value), _prose(value)]
    if inspect.isclass(value):
        parts += [_prose(base) for base in value.__mro__[1:] if base.__module__ == value.__module__ == "dllp.config"]
        for method, member in _members(value):
            parts.append(
                f"#### {name}.{method}\n\n{_signature(method, member)}\n\n{_prose(member)}".replace("\n\n\n", "\n")
            )
    return "\n\n".join(filter(None, parts))


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of its own, in the order of the source."""
    for method, member in vars(owner).items():
        if not method.startswith("_") and (callable(member) or isinstance(member, property | classmethod)):
            yield method, member


def _signature(name: str, value: Any) -> str:
    """The head of a function or class as code; nothing for a property or a plain error."""
    function = value.__func__ if isinstance(value, classmethod) else value
    if isinstance(function, property) or (inspect.isclass(function) and issubclass(function, Exception)):
        return ""
    if inspect.isclass(function) and function.__name__ == "Config":  # its fields are explained below
        return ""
    found = inspect.signature(function)
    shown = list(_shown(p for p in found.parameters.values() if p.name not in ("self", "cls")))
    end = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    head = f"def {name}({', '.join(shown)}){end}: ..."
    if len(head) > WIDTH:
        inner = "".join(f"    {part},\n" for part in shown)
        head = f"def {name}(\n{inner}){end}: ..."
    return f"<!-- test: skip -->\n```python\n{head}\n```"


def _shown(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    """Parameters as they are written, with the star before those that must be named."""
    named = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not named:
            named = True
            yield "*"
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        named = named or p.kind is p.VAR_POSITIONAL
        text = f"{stars}{p.name}" + ("" if p.annotation is p.empty else f": {p.annotation}")
        if p.default is not p.empty:
            value = "..." if "factory" in repr(p.default) else repr(p.default).replace("'", '"')
            text += f" = {value}"
        yield text


def _first(value: Any) -> str:
    return _plain((inspect.getdoc(value) or "").split("\n\n")[0])


def _plain(text: str) -> str:
    """A paragraph in one line, roles of Sphinx as code."""
    return " ".join(re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).split())


def _prose(value: Any) -> str:
    """A docstring as Markdown: paragraphs, and a list of arguments or attributes."""
    parts = []
    for paragraph in (inspect.getdoc(value) or "").split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if head.strip() in ("Args:", "Attributes:", "Returns:"):
            entries = re.split(r"\n(?=    \S)", "\n" + rest)[1:]
            for entry in entries:
                names, _, text = entry.strip().partition(": ")
                parts.append(f"- `{names.replace(', ', '`, `')}`: {_plain(text)}")
            parts.append("")
        else:
            parts += [_plain(paragraph), ""]
    return "\n".join(parts).strip()


def main() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
