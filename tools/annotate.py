"""Refresh the code in docs/annotated.md, the papers annotated with the code.

    python -m tools.annotate

A comment before each block of the page names the code that the block shows, and the page does not
display it. After <!-- noloco.outer_update --> comes the code of that name, without its docstring.
After <!-- skippipe.simulate | end = now ... # S4 --> come only the lines from the first that has
the words on the left to the next that has those on the right, and after
<!-- skippipe.simulate | # S3 --> only the first line that has these words.
"""
import ast
import re
import textwrap
from pathlib import Path

HERE = Path(__file__).parent.parent
PAGE = HERE / "docs/annotated.md"
COMMENT = r"^<!-- ([\w.]+)(?: \| ([^\n]+))? -->\n"
BLOCK = re.compile(COMMENT + r"```python\n.*?^```$", re.M | re.S)


def main():
    PAGE.write_text(refreshed(PAGE.read_text()))
    print(PAGE.relative_to(HERE))


def refreshed(text):
    """The page with the present code. Raises ValueError for a comment that names no code."""
    return BLOCK.sub(refreshed_block, text)


def refreshed_block(block):
    """The comment as it stands, and a block of the code that it names."""
    comment, _ = block[0].split("\n", 1)
    name, words = block.groups()
    lines = code_of(name)
    if words:
        lines = between(name, lines, *words.split(" ... "))
    code = textwrap.dedent("\n".join(lines))
    return f"{comment}\n```python\n# {name}\n{code}\n```"


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
