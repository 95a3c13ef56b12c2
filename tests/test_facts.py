"""No code of the product decides by the text of a message: facts travel as data (`core.errors.Problem`, enums)."""

import ast

import pytest

from tests.test_house import PRODUCT, ROOT, parsed

# Files that look into texts of others, which say in no other form what they mean.
ALLOWED = {
    "core/library_errors.py": "XLA, TensorStore and Gloo",
    "launch/config/loader.py": "a constructor, which may be a user's, names a parameter only in its error's message",
    "launch/config/sources.py": "gin's parser",
    "parallel/compiled/compiling.py": "the TPU compiler",
    "parallel/compiled/hlo/messages.py": "the TPU compiler",
}
MESSAGES = {"detail", "message", "problem", "reason", "said", "says", "status", "warning"}
ASKING = {"startswith", "endswith", "find", "index", "count", "replace"}
PATTERNS = {"search", "match", "fullmatch", "findall"}


def decisions(tree):
    """The lines that ask what an error's text, a representation or a message contains."""
    nodes = list(ast.walk(tree))
    caught = {handler.name for handler in nodes if isinstance(handler, ast.ExceptHandler)} | {"error"}

    def is_text(node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            of = node.args[0]
            return node.func.id == "repr" or (node.func.id == "str" and isinstance(of, ast.Name) and of.id in caught)
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return name in MESSAGES

    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops) or any(map(_is_written, sides))
            found = asks and any(map(is_text, sides))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.func.value if node.func.attr in ASKING else None
            given = node.args if node.func.attr in PATTERNS else ()
            found = (asked is not None and is_text(asked)) or any(map(is_text, given))
        else:
            found = False
        if found:
            yield node.lineno


def _is_written(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_code_decides_by_the_text_of_a_message():
    found = {}
    for path in PRODUCT:
        name = path.relative_to(ROOT).as_posix()
        if lines := sorted(set(decisions(parsed(path)))):
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert found.keys() == ALLOWED.keys()  # none that is no longer needed


@pytest.mark.parametrize(
    "line",
    [
        "'RESOURCE' in str(error)",
        "str(error).startswith('a')",
        "re.search('step', str(error))",
        "_STATUS.match(message)",
        "repr(file) in text",
        "row.status.startswith('failed')",
        "status == 'done'",
        "message.replace('text.files.train', '--data')",
    ],
)
def test_decisions_by_texts_are_found(line):
    assert list(decisions(ast.parse(line)))


@pytest.mark.parametrize("line", ["print(str(error))", "f'{said}: {error}'", "status == State.DONE", "a in b"])
def test_messages_may_be_shown_and_facts_compared(line):
    assert not list(decisions(ast.parse(line)))
