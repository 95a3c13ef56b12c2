import json
import math

import pytest

from core.files import foreign_json

MALFORMED = {
    "nested beyond Python's parser": "[" * 200_000,
    "nested beyond what is expected": "[" * 65 + "]" * 65,
    "nested in objects": '{"a": ' * 65 + "1" + "}" * 65,
    "infinite": "[1e400]",
    "minus infinite": "[-1e400]",
    "NaN": "[NaN]",
    "Infinity": "[Infinity]",
    "an integer of thousands of digits": "[" + "9" * 5000 + "]",
    "a repeated key": '{"a": {"b": 1, "b": 2}}',
    "no JSON": "{",
    "nothing": "",
    "no UTF-8": b"\xff\xff",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_not_strict_json_is_an_error_of_one_type(what):
    with pytest.raises(foreign_json.MalformedError):
        foreign_json.loads(MALFORMED[what])


def test_json_is_parsed_as_it_is():
    text = '{"a": [1, 2.5, true, null, "ü", {"b": -1e-300}]}'
    assert foreign_json.loads(text) == {"a": [1, 2.5, True, None, "ü", {"b": -1e-300}]}
    deepest = "[" * foreign_json.MOST_NESTED + "]" * foreign_json.MOST_NESTED
    assert foreign_json.loads(deepest.encode())
    assert math.isclose(foreign_json.loads("1.7976931348623157e308"), 1.7976931348623157e308)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "expected an object, found list"),
        ("{}", "pid is missing"),
        ('{"pid": "7"}', "pid is str '7', expected int"),
        ('{"pid": true}', "pid is bool 'True', expected int"),
        ('{"pid": 7, "started": null}', "started is NoneType 'None', expected float"),
    ],
)
def test_an_object_has_the_keys_and_types_that_its_reader_needs(text, said):
    with pytest.raises(foreign_json.MalformedError, match=said):
        foreign_json.load_object(text, {"pid": int, "started": float})


def test_a_float_may_be_written_as_an_integer_and_other_keys_are_kept():
    found = foreign_json.load_object('{"pid": 7, "started": 3, "more": []}', {"pid": int, "started": float})
    assert found == {"pid": 7, "started": 3, "more": []}


@pytest.mark.parametrize("text", ["[NaN]", "[1e400]", '{"a": 1, "a": 2}'])
def test_a_file_of_a_lenient_writer_is_read_as_python_reads_it(text):
    assert repr(foreign_json.loads(text, strict=False)) == repr(json.loads(text))
    with pytest.raises(foreign_json.MalformedError):
        foreign_json.loads("[" * 200_000, strict=False)
