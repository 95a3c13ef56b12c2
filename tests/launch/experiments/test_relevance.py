"""The measure of where a selector looks, by hand."""

import numpy as np

from launch.experiments import relevance
from launch.experiments.asked import Answered
from tasks.vision.question_lines import Question


def answered(image, kind, cells, chosen, right=True):
    mask = np.zeros(16, bool)
    mask[chosen] = True
    return Answered(Question("", image, "what ?", "a", kind, grid=2, cells=cells), {}, mask, np.zeros(0, int), right)


def test_the_share_of_chosen_patches_in_cells_by_hand():
    chosen = np.zeros(16, bool)
    chosen[[0, 1, 2, 10]] = True  # two of the cell at the top left, one right of it, one at the bottom right
    found = [relevance.share_inside(chosen, 2, cells) for cells in ((0,), (1,), (2,), (3,), (0, 3))]
    assert found == [0.5, 0.25, 0.0, 0.25, 0.75]
    assert relevance.share_inside(chosen, 1, (0,)) == 1
    assert relevance.share_inside(np.zeros(16, bool), 2, (0,)) == 0  # nothing was chosen
    assert [relevance.share_inside(np.eye(16, dtype=bool)[5], 3, (c,)) for c in (0, 4)] == [0, 1]  # by its center
    # 4 x 4 patches of 3 pixels in an image of 16: the third column's center is at 7.5 pixels, in the left half
    assert [relevance.share_inside(np.eye(16, dtype=bool)[2], 2, (0,), covered=c) for c in (1, 0.75)] == [0, 1]


def test_choices_for_other_cells_of_the_same_image_are_compared():
    answers = [
        answered("a", "place", (0,), [0, 1]),
        answered("a", "place", (3,), [1, 10]),
        answered("a", "relation", (0, 1), [2, 3]),  # shares a cell with the first
        answered("b", "place", (3,), [0, 1]),
    ]
    assert relevance.overlaps(answers) == [0.5, 0.0]


def test_the_table_has_a_row_for_each_kind_and_one_for_all():
    answers = [answered("a", "x", (0,), [0, 1]), answered("a", "y", (0, 1), [8, 9], right=False)]
    columns = [list(column.cells) for column in relevance.table(answers).columns]
    assert columns == [
        ["x", "y", "all"],
        ["1", "1", "2"],
        ["100.0%", "0.0%", "50.0%"],
        ["100.0%", "0.0%", "50.0%"],
        ["25.0%", "50.0%", "37.5%"],
    ]


def test_the_share_of_all_patches_counts_patches_where_cells_do_not_divide_them():
    of_grid = answered("a", "x", (4,), [5, 0])._replace(question=Question("", "a", "?", "a", "x", grid=3, cells=(4,)))
    (_, _, _, [inside], [area]) = (list(column.cells) for column in relevance.table([of_grid]).columns)
    assert (inside, area) == ("50.0%", "25.0%")  # 4 of 16 patches have their center in the middle cell of 9
