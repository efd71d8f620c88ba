"""What each room may weigh and what it may import: an addition takes something else away."""

import ast
import io
import re
import tokenize

import pytest

from tests.harness import HERE

# Aims: survive/ 760, tests/ 3000. They may only shrink.
BUDGETS = {
    "code": {       # lines without docstrings, comments and blanks, of a file or of all files of a folder
        "noloco.py": 140, "model.py": 115, "skippipe.py": 400, "train.py": 380, "bench_sync.py": 270,
        "test_minimal.py": 420, "plumbing": 1150, "planning": 650, "survive": 763, "tools": 420,
        "experiments": 1350, "tests": 3085,
    },
    "words": {"README.md": 1750, "docs/*.md": 13000, "docs/results.md": 4500},
    "lines": {"README.md": 200},
}
IMPORTS = {     # of ours; a room that is not named here may import everything
    "noloco.py": [], "model.py": [], "bench_sync.py": ["noloco"],
    "skippipe.py": ["planning.__main__"],       # by `python skippipe.py` only
    "planning": ["skippipe", "planning", "plumbing.processes"],
    "plumbing": ["noloco", "model", "skippipe", "planning", "plumbing"],
}
EQUATIONS = {"N": "noloco.py", "S": "skippipe.py", "B": "bench_sync.py", "M": "plumbing/onebyte.py",
             "Q": "plumbing/wires.py"}


def sources(*rooms):
    """{path from the repository's root: text} of files, folders' Python files, and patterns."""
    found = [path for room in rooms for path in HERE.glob(room)]
    files = [file for path in found for file in ([path] if path.is_file() else path.rglob("*.py"))]
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


COUNT = {"code": code_lines, "words": lambda text: len(text.split()),
         "lines": lambda text: len(text.splitlines())}


@pytest.mark.parametrize("unit, room", [(unit, room) for unit, rooms in BUDGETS.items() for room in rooms])
def test_a_room_is_within_its_budget(unit, room):
    counts = {file: COUNT[unit](text) for file, text in sources(room).items()}
    assert 0 < sum(counts.values()) <= BUDGETS[unit][room], counts


@pytest.mark.parametrize("room", IMPORTS)
def test_imports_point_down(room):
    ours = {name.removesuffix(".py") for name in BUDGETS["code"]}
    for file, text in sources(room).items():
        for node in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (before + alias.name for alias in node.names):
                allowed = any(f"{name}.".startswith(f"{low}.") for low in IMPORTS[room])
                assert allowed or name.split(".")[0] not in ours, f"{file} imports {name}"
                assert (room, name.split(".")[0]) != ("skippipe.py", "torch"), f"{file} imports {name}"


def test_an_equations_number_is_defined_once_and_the_rho_rule_has_none():
    found, texts = [], sources(*BUDGETS["code"])
    for file, text in texts.items():
        numbers = re.findall(r"\(([NSBMQ]\d)\)$", ast.get_docstring(ast.parse(text)) or "", re.M)
        found += numbers
        assert all(EQUATIONS[number[0]] == file for number in numbers), f"{file} defines {numbers}"
    assert sorted(found) == "B1 B2 B3 B4 B5 M1 M2 M3 M4 N1 N2 N3 Q1 Q2 Q3 S1 S2 S3 S4 S5".split()
    texts |= sources("*.md", "docs/*.md")
    # experiments/runs.py renames the labels of older results
    assert [file for file in texts if re.search(r"Eqs?[.] ?6\b", texts[file])] == ["experiments/runs.py"]
