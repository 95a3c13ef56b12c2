"""Lines of questions: where they point."""

import json

import pytest

from core.errors import UserError
from tasks.vision import question_lines


def test_paths_of_images_in_a_bucket_may_lead_out_of_the_folder_of_the_lines():
    line = {"image": "../images/./7.png", "question": "q", "answer": "a"}
    found = question_lines.read_question("gs://bucket/data/lists/a.jsonl", 1, json.dumps(line).encode())
    assert found.image == "gs://bucket/data/images/7.png"


@pytest.mark.parametrize(
    ("grid", "cells", "said"),
    [
        (2, [4], "cells is \\[4\\], expected a list of numbers from 0 to 3, for the 2 x 2 cells"),
        (3, [], "cells is \\[\\], expected a list of numbers from 0 to 8"),
        (2, [True], "cells is \\[True\\]"),
        (2, None, "cells is None"),
        (0, [0], "grid = 0: expected an integer of at least 1"),
        (None, [0], "grid = None"),
    ],
)
def test_cells_that_are_not_of_the_grid_are_errors(grid, cells, said):
    line = {"image": "a.png", "question": "q", "answer": "a", "grid": grid, "cells": cells}
    with pytest.raises(UserError, match=f"a.jsonl:7: {said}"):
        question_lines.read_question("a.jsonl", 7, json.dumps(line).encode())
    good = question_lines.read_question("a.jsonl", 7, json.dumps({**line, "grid": 2, "cells": [3, 1]}).encode())
    assert (good.grid, good.cells) == (2, (3, 1))
