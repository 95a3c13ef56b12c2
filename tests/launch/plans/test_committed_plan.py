"""The plan that is shipped answers for the experiment as it is, and arithmetic stands near all that was compiled."""

import pytest

from launch.plans import planning, records, worker
from parallel import compiled


def known_of(question, folder):
    """Every candidate that has an estimate and a record, those included that arithmetic says do not fit."""
    store = records.Store(folder, with_committed=True)
    found = [(one, store.find(one.text)) for one in planning.consider(question) if one.estimate]
    usable = question.slice.chip.usable_hbm_bytes
    return [(one, record.within(usable)) for one, record in found if record is not None]


@pytest.fixture(scope="module")
def question():
    return planning.ask("gin/valkyrie_7b.gin", slice_name="v4-32", bindings=[], batch_sizes=[])


@pytest.fixture(scope="module")
def known(question, tmp_path_factory):
    return known_of(question, tmp_path_factory.mktemp("empty"))


def is_the_winner(question, known, *, of):
    """Of at least so many that fit."""
    found = [(one, record) for one, record in known if not one.reason]
    assert len(planning.ranked(found)) >= of
    best, record = planning.winner(found)
    assert best.is_as_written
    assert record.needed_bytes < question.slice.chip.usable_hbm_bytes


@pytest.mark.covers("L12")
def test_valkyrie_7b_is_the_winner_of_its_committed_plan(question, known):
    is_the_winner(question, known, of=8)


def planned(name, slice_name, *, of, **more):
    return pytest.param(f"gin/{name}.gin", slice_name, of, id=name, **more)


@pytest.mark.covers("L12")
@pytest.mark.parametrize(
    ("path", "slice_name", "of"),
    [
        planned("valkyrie_5b", "v5p-128", of=4),
        planned("valkyrie_16b", "v4-64", of=6, marks=pytest.mark.slow),
        planned("valkyrie_100b", "v5p-128", of=4, marks=pytest.mark.slow),
        planned("valkyrie_128b", "v5p-1024", of=5, marks=pytest.mark.slow),
        planned("valkyrie_7b_v4_64", "v4-64", of=6, marks=pytest.mark.slow),
        planned("valkyrie_7b_2xv4_32", "2xv4-32", of=4, marks=pytest.mark.slow),
        planned("valkyrie_7b_64_rows", "v4-32", of=4, marks=pytest.mark.slow),
    ],
)
def test_every_other_valkyrie_is_the_winner_of_its_own(path, slice_name, of, tmp_path):
    question = planning.ask(path, slice_name=slice_name, bindings=[], batch_sizes=[])
    is_the_winner(question, known_of(question, tmp_path), of=of)


@pytest.mark.covers("X05")
def test_arithmetic_is_near_every_record(known):
    """With `none` too, which keeps gathered weights; a message of the compiler says what it needs of what it has."""
    assert {record.status for _, record in known} == {records.COMPILED, records.TOO_MUCH}
    ratios = {one.name: one.estimate.peak_bytes / record.needed_bytes for one, record in known}
    assert all(0.95 < ratio < 1.08 for ratio in ratios.values()), ratios


def test_what_did_not_fit_is_too_much_by_arithmetic_too(question, known):
    """And is refused where it is far from fitting, so that the compiler's time is not spent on it."""
    too_large = [one for one, record in known if record.status == records.TOO_MUCH]
    assert too_large
    assert all(record.needed_bytes > question.slice.chip.usable_hbm_bytes for _, record in known if not record.time)
    usable = question.slice.chip.usable_hbm_bytes
    refused = {one.kind == "too much HBM by arithmetic" for one in too_large if one.estimate.peak_bytes > 1.15 * usable}
    assert refused == {True}
    assert all(one.estimate.peak_bytes > usable for one in too_large)


@pytest.mark.slow
def test_the_code_still_makes_the_winner_s_program(question, known):
    """A record says which program it is of; where this fails, `launch/run plan … --fresh --record` compiles anew."""
    best, record = planning.winner([(one, record) for one, record in known if not one.reason])
    assert best.is_as_written
    bound = question.experiment.bind(compiled.devices_of(question.slice))
    assert worker.program_digest(bound) == record.made_with["program"]
