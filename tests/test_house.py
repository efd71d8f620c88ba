"""What each room may weigh and what it may import: an addition takes something else away."""

import ast
import io
import re
import tokenize

import pytest

from tests.harness import HERE

CODE = {    # lines of code, in a file or in all files of a folder
    "noloco.py": 140, "model.py": 115, "skippipe.py": 400, "train.py": 380, "bench_sync.py": 270,
    "test_minimal.py": 420, "plumbing": 1150, "planning": 650, "survive": 760, "tools": 420,
    "experiments": 1350, "tests": 3000,
}
WORDS = {"README.md": 1750, "docs/*.md": 13000, "docs/results.md": 4500}
IMPORTS = {     # of ours; a room that is not named here may import everything
    "noloco.py": [], "model.py": [], "bench_sync.py": ["noloco"],
    "skippipe.py": ["planning.__main__"],       # by `python skippipe.py` only
    "planning": ["skippipe", "planning", "plumbing.processes"],
    "plumbing": ["noloco", "model", "skippipe", "planning", "plumbing"],
}
EQUATIONS = {"N": "noloco.py", "S": "skippipe.py", "B": "bench_sync.py", "M": "plumbing/onebyte.py"}


def sources(*rooms):
    """{path from the repository's root: text} of the rooms' Python files."""
    files = [file for room in rooms for file in [HERE / room, *(HERE / room).rglob("*.py")] if file.is_file()]
    return {file.relative_to(HERE).as_posix(): file.read_text() for file in files}


def code_lines(text):
    """How many lines hold more than docstrings, comments and blanks."""
    blank = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    docstrings, found = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in blank:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def over(what, counts, budget):
    """None, or the sentence that names what is over its budget."""
    total = sum(counts.values())
    return f"{what}: {total} of {budget}: {counts}" if total > budget else None


@pytest.mark.parametrize("room", CODE)
def test_code_is_within_its_budget(room):
    texts = sources(room)
    assert not over(f"{room}, lines", {name: code_lines(text) for name, text in texts.items()}, CODE[room])
    assert [name for name, text in texts.items() if max(map(len, text.splitlines()), default=0) > 110] == []


@pytest.mark.parametrize("pattern", WORDS)
def test_prose_is_within_its_budget(pattern):
    texts = {file.name: file.read_text() for file in HERE.glob(pattern)}
    assert not over("words", {name: len(text.split()) for name, text in texts.items()}, WORDS[pattern])
    if "README.md" in texts:
        assert not over("lines", {"README.md": len(texts["README.md"].splitlines())}, 200)


@pytest.mark.parametrize("room", IMPORTS)
def test_imports_point_down(room):
    ours = {name.removesuffix(".py") for name in CODE}
    for file, text in sources(room).items():
        for node in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (before + alias.name for alias in node.names):
                allowed = any(f"{name}.".startswith(f"{low}.") for low in IMPORTS[room])
                assert allowed or name.split(".")[0] not in ours, f"{file} imports {name}"
                assert (room, name.split(".")[0]) != ("skippipe.py", "torch"), f"{file} imports {name}"


def test_an_equations_number_is_defined_once_and_the_rho_rule_has_none():
    found, texts = [], sources(*CODE)
    for file, text in texts.items():
        numbers = re.findall(r"\(([NSBM]\d)\)$", ast.get_docstring(ast.parse(text)) or "", re.M)
        found += numbers
        assert all(EQUATIONS[number[0]] == file for number in numbers), f"{file} defines {numbers}"
    assert sorted(found) == "B1 B2 B3 B4 B5 M1 M2 M3 M4 N1 N2 N3 S1 S2 S3 S4 S5".split()
    texts |= {file.name: file.read_text() for file in [*HERE.glob("*.md"), *HERE.glob("docs/*.md")]}
    named = [file for file, text in texts.items() if re.search(r"Eqs?[.] ?6\b", text)]
    assert named == ["experiments/runs.py"]         # which reads the labels of older results
