"""Write docs/annotated.md, the papers beside the code: docs/annotated.in.md with the code put in.

    python -m tools.annotate

A line {{noloco.outer_update}} becomes the code of that name, without its docstring. Of
{{skippipe.simulate | end = now ... # S4}} only the lines from the first that has the words on the
left to the next that has those on the right; of {{skippipe.simulate | # S3}} only the first line
that has them.
"""
import ast
import re
import textwrap
from pathlib import Path

HERE = Path(__file__).parent.parent
PAGE = HERE / "docs/annotated.md"
TEMPLATE = HERE / "docs/annotated.in.md"
PLACE = re.compile(r"^\{\{([\w.]+)(?: \| (.+?))?\}\}$", re.M)


def main():
    PAGE.write_text(page())
    print(PAGE.relative_to(HERE))


def page():
    """What docs/annotated.md has to be. Raises ValueError for a place that names no code."""
    return PLACE.sub(excerpt, TEMPLATE.read_text())


def excerpt(place):
    name, words = place.groups()
    lines = code_of(name)
    if words:
        lines = between(name, lines, *words.split(" ... "))
    return f"# {name}\n" + textwrap.dedent("\n".join(lines))


def code_of(name):
    """The lines of a function, class or constant of our files, without its docstring."""
    path, names = file_of(name)
    text = path.read_text()
    node = ast.parse(text)
    for wanted in names:
        node = named(node, wanted, name)
    first = min([node.lineno] + [mark.lineno for mark in getattr(node, "decorator_list", [])])
    left_out = range(0)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
        docstring = node.body[0]
        left_out = range(docstring.lineno, docstring.end_lineno + 1)
    lines = text.splitlines()
    return [lines[i - 1] for i in range(first, node.end_lineno + 1) if i not in left_out]


def file_of(name):
    """(the file, the names in it): noloco.NoLoCo.step is NoLoCo.step in noloco.py."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        path = HERE.joinpath(*parts[:count]).with_suffix(".py")
        if path.exists():
            return path, parts[count:]
    raise ValueError(f"{name}: there is no such file")


def named(parent, wanted, name):
    """The definition of this name among those of a module or class."""
    for node in parent.body:
        targets = [target.id for target in getattr(node, "targets", [])
                   if isinstance(target, ast.Name)]
        if wanted in [getattr(node, "name", None), *targets]:
            return node
    raise ValueError(f"{name}: there is no {wanted} in it")


def between(name, lines, first, last=None):
    """The lines from the first that has these words to the next that has the last ones."""
    start = find(name, lines, first, 0)
    end = find(name, lines, last, start) if last else start
    return lines[start:end + 1]


def find(name, lines, words, start):
    for i in range(start, len(lines)):
        if words in lines[i]:
            return i
    raise ValueError(f"{name}: no line from there on has {words!r}")


if __name__ == "__main__":
    main()
