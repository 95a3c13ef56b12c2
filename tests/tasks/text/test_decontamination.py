"""Documents that share text with evaluation sets are found, and others are not."""

import random

import pytest

from core.errors import UserError
from tasks.text.decontamination import Excluded, read

SOLUTION = """    for idx, elem in enumerate(numbers):
        for idx2, elem2 in enumerate(numbers):
            if idx != idx2:
                distance = abs(elem - elem2)
"""
QUESTION = "How many of the seven wise men of Gotham went to sea in a bowl that was stronger?"


@pytest.mark.covers("D13")
@pytest.mark.parametrize(
    ("text", "words", "characters"),
    [
        (f"x = 1\n{SOLUTION.replace('    ', chr(9))}\ny = 2", None, 40),  # with tabs
        ("abc é " + "distance = abs(elem - elem2) distance"[:28] + " = 3", None, 28),
        ("He asked: how many of the SEVEN wise men, of Gotham, went to sea in a bowl?", 13, None),
    ],
)
def test_shared_text_is_found(text, words, characters):
    assert Excluded([SOLUTION, QUESTION, "é" * 50], words=words, characters=characters).shares_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "for idx, elem in enumerate(names):\n    print(elem)",  # 29 characters in common
        "How many of the seven wise men of Gotham? Went to sea in a bowl that was",  # 17 words
        "how many of the seven wise men of gotham went in a bowl to sea",
    ],
)
def test_text_that_shares_less_is_kept(text):
    excluded = Excluded([SOLUTION, QUESTION], words=18, characters=41)
    assert not excluded.shares_text(text)


def test_substrings_are_found_as_by_comparing_each_with_each():
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab é🙂", k=draw.randrange(60))) for _ in range(300)]
    spaced = [" ".join(text.split()) for text in texts]
    known = spaced[:20]
    excluded = Excluded(known, words=None, characters=16)
    windows = {text[at : at + 16] for text in known for at in range(len(text) - 15)}
    found = [excluded.shares_text(text) for text in texts]
    assert found == [any(text[at : at + 16] in windows for at in range(len(text) - 15)) for text in spaced]
    assert any(found[20:]) or sum(found) >= 5


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.mark.parametrize(
    ("text", "by", "length"),
    [(" ".join(WORDS), {"words": 4, "characters": None}, 4), ("".join(WORDS), {"words": None, "characters": 16}, 16)],
    ids=["words", "characters"],
)
def test_the_first_and_the_last_part_count_in_the_excluded_text_and_in_the_document(text, by, length):
    units = text.split() if by["words"] else list(text)
    glue = " " if by["words"] else ""
    excluded = Excluded([text], **by)
    for at in range(len(units) - length + 1):
        shared = glue.join(units[at : at + length])
        assert excluded.shares_text(shared)
        for document in (f"{shared} other words 123", f"other words 123 {shared}"):
            assert excluded.shares_text(document), (at, document)
        assert not excluded.shares_text(glue.join(units[at : at + length - 1]))


@pytest.mark.parametrize(
    ("texts", "lengths", "message"),
    [
        ([QUESTION], {"words": 3, "characters": None}, "by 3 words: expected at least 4"),
        ([QUESTION], {"words": None, "characters": 15}, "by 15 characters: expected at least 16"),
        ([QUESTION], {"words": None, "characters": None}, "neither words nor characters"),
        (["too short"], {"words": 13, "characters": None}, "no excluded text has 13 words"),
    ],
)
def test_filters_that_find_nothing_or_everything_are_refused(texts, lengths, message):
    with pytest.raises(UserError, match=message):
        Excluded(texts, **lengths)


def test_evaluation_sets_are_texts_and_strings_of_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"x": ["three", {"y": "four"}], "z": 5}\n\n"six"\n')
    assert read([f"{tmp_path}/*"]) == ["one\ntwo", "three", "four", "six"]
    for line in ("{", "[" * 200_000):
        (tmp_path / "b.jsonl").write_text("{}\n" + line)
        with pytest.raises(UserError, match=r"b\.jsonl, line 2: "):
            read([f"{tmp_path}/b*"])
    (tmp_path / "c.csv").write_text("a,b")
    for pattern, message in (("c*", "expected .txt or .jsonl"), ("d*", "no file matches")):
        with pytest.raises(UserError, match=message):
            read([f"{tmp_path}/{pattern}"])
