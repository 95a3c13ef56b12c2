"""The messages of docs/reference/messages.md: the test that messages.json names contains each."""

import ast
import json
import re
from pathlib import Path

import pytest

from launch.environment import WORKSPACE as ROOT

SHOWN_BY = json.loads(Path(__file__).with_name("messages.json").read_text())
CHANGES = re.compile(
    r"\d[\d.]*(?: s\b)?|/\S+"
)  # numbers, with their seconds, and paths: of an example, not of the message
FEWEST_LETTERS = 10


def messages():
    return re.findall(r"^\* `(.+)`$", (ROOT / "docs/reference/messages.md").read_text(), re.MULTILINE)


def fixed_parts(message):
    """Of what stands between two `…`, that with the most letters, as the pieces that are in every such message."""
    stretches = re.sub(r"\([^()]*\)", "0", message).split("…")
    pieces = [[piece for cut in CHANGES.split(s) if (piece := cut.strip(" :;,."))] for s in stretches]
    return max(pieces, key=letters)


def letters(pieces):
    return sum(character.isalpha() for piece in pieces for character in piece)


def texts(path):
    """Every text in a Python file, joined where it is written in parts, without the backslashes of patterns."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return [re.sub(r"\\(.)", r"\1", text) for text in found]


def is_shown(message, path):
    """Whether one line of a text in the file has the fixed parts of the message, in their order."""
    pattern = re.compile(".*".join(map(re.escape, fixed_parts(message))))
    return any(pattern.search(text) for text in texts(path))


@pytest.mark.covers("X14")
@pytest.mark.parametrize("message", messages(), ids=lambda message: message[:40])
def test_a_message_is_one_that_its_test_looks_for(message):
    test = SHOWN_BY[message]
    assert letters(fixed_parts(message)) >= FEWEST_LETTERS, f"nothing by which to know {message!r}"
    assert (ROOT / test).is_file()
    assert is_shown(message, ROOT / test), f"no text of {test} has {' … '.join(fixed_parts(message))!r}"


def test_there_is_a_message_for_each_way_to_end():
    assert len(messages()) >= 20
    assert set(messages()) == set(SHOWN_BY)


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("waited 300 s at … for 4 hosts; missing: host 2 (10.0.0.4)", ["for", "hosts; missing: host"]),
        ("process 4711 holds /dev/accel0: …", ["process", "holds"]),
        ("host 2 (…) has been silent for 20 s", ["host", "has been silent for"]),
    ],
)
def test_variable_parts_are_not_part_of_a_message(tmp_path, message, parts):
    assert fixed_parts(message) == parts
    test = tmp_path / "test_x.py"
    test.write_text(f"says = rf'{' {number} '.join(parts)} '\n")
    assert is_shown(message, test)
    test.write_text(f"says = '{' … '.join(parts[:-1])}'  # {' '.join(parts)}\n")
    assert not is_shown(message, test)
