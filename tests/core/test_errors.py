"""Problems are sentences that carry their facts."""

import copy
import pickle

from core.errors import Problem


def test_a_problem_is_a_sentence_made_of_its_facts():
    found = Problem(
        "no file matches '/a/*.txt'", setting="text.files.train", file="/a/*.txt", expected="some", fix="go on"
    )
    assert found == "text.files.train: no file matches '/a/*.txt', expected some; go on"
    assert (found.file, found.line, found.fix) == ("/a/*.txt", 0, "go on")
    assert Problem("DATA is not set") == "DATA is not set"


def test_another_name_of_the_setting_changes_nothing_else():
    found = Problem("is a folder", setting="text.files.train", file="/a", line=3, fix="name its files")
    flag = found.with_setting("--data")
    assert flag == "--data: is a folder; name its files"
    assert {**vars(flag), "setting": ""} == {**vars(found), "setting": ""}


def test_copies_keep_the_facts():
    found = Problem("is a folder", setting="DATA", file="/a", line=3)
    for made in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert (made, vars(made)) == (found, vars(found))
