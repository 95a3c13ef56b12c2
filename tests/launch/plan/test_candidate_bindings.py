"""Candidates as gin bindings: applied directly, through gin, and from the written file."""

import pytest

from launch import program_identity
from launch.config import changes, loader
from launch.config.changes import Changes
from launch.plan import search
from parallel.planning.candidates import Candidate, Choice, Layout

CANDIDATES = [
    Candidate(Layout("fsdp", (("fsdp", -1),)), "full", 2, 32),
    Candidate(Layout("mesh3d", (("data", 2), ("fsdp", -1), ("tensor", 2))), "dots", 1, 64),
    Candidate(
        Layout("pipeline", (("stage", 2), ("data", -1)), Choice("gpipe", (("num_microbatches", 4), ("save", "stage")))),
        None,
        1,
        32,
    ),
    Candidate(
        Layout(
            "pipeline_fsdp",
            (("stage", 2), ("fsdp", -1), ("slices", 1)),
            Choice("circular", (("num_microbatches", 4), ("repeats", 2), ("save", "layers"))),
        ),
        None,
        1,
        32,
    ),
    Candidate(Layout("context", (("sequence", 2), ("fsdp", -1)), ring=True), "full", 1, 32),
    Candidate(None, "none", 1, 32),
]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name(""))
def test_bindings_and_apply_give_the_same_experiment(question, candidate, tmp_path):
    writer = search.Writer(question.config, question.experiment)
    wanted = search.apply(question.experiment, candidate)

    def made(bindings):
        built = loader.load(question.path, bindings=bindings, slice_name=question.slice.name).build()
        return built.strategy, built.model, built.accum_steps, built.batch_size, built.total_steps

    expected = wanted.strategy, wanted.model, wanted.accum_steps, wanted.batch_size, wanted.total_steps
    assert made(writer.bindings(candidate)) == expected
    file = tmp_path / "winner.gin"
    file.write_text(writer.file(candidate, ["why"]))
    assert made([f"include '{file}'"]) == expected


def test_the_experiment_as_written_needs_no_binding(question):
    writer = search.Writer(question.config, question.experiment)
    own = Candidate(None, question.experiment.model.remat, 1, question.experiment.batch_size)
    assert writer.bindings(own) == []
    assert search.apply(question.experiment, own) == question.experiment


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["experiment.Experiment.total_steps = 1001"],
        ["KEEP_CHECKPOINTS = 1001", "experiment.Experiment.total_steps = %KEEP_CHECKPOINTS"],
        ["experiment.Experiment.batch_size = 32", "experiment.Experiment.accum_steps = 1"],
        ["experiment.Experiment.batch_size = %NUM_STREAMS", "NUM_STREAMS = 32"],
    ],
)
def test_another_batch_trains_on_as_many_tokens_however_the_experiment_says_how_long(given, tmp_path):
    asked = search.ask("gin/quickstart.gin", slice_name="v4-8", bindings=given)
    old = asked.experiment
    writer = search.Writer(asked.config, old)
    said = writer.bindings(Candidate(None, None, 2, 48))
    file = tmp_path / "other.gin"
    file.write_text(writer.file(Candidate(None, None, 2, 48), []))
    for bindings in (said, [f"include '{file}'"]):
        built = loader.load(asked.path, bindings=[*given, *bindings], slice_name="v4-8").build()
        assert (built.batch_size, built.accum_steps) == (48, 2)
        assert 0 <= built.total_steps * 48 - old.total_steps * old.batch_size < 48
        assert built.total_steps == asked.steps(48)
        assert built.task.num_streams == old.task.num_streams


def test_degrees_of_the_file_do_not_remain():
    """A candidate of the file's own strategy binds every degree, so that none of the file's stays beside it."""
    asked = search.ask(
        "gin/quickstart.gin",
        slice_name="v4-8",
        bindings=[
            "STRATEGY = @strategies.fsdp_tensor()",
            "strategies.fsdp_tensor.tensor = 1",
            "strategies.fsdp_tensor.fsdp = 4",
        ],
    )
    candidate = Candidate(Layout("fsdp_tensor", (("tensor", 2), ("fsdp", -1))), "full", 1, 32)
    writer = search.Writer(asked.config, asked.experiment)
    built = loader.load(asked.path, bindings=[*asked.bindings, *writer.bindings(candidate)], slice_name="v4-8").build()
    assert built.strategy.mesh_shape == {"fsdp": -1, "tensor": 2}


def test_the_written_file_leaves_out_what_was_given_for_another_strategy(tmp_path):
    given = ["strategies.fsdp.overlap_reduction = True"]
    asked = search.ask("gin/quickstart_phases.gin", slice_name="v4-16", bindings=[*given, "PHASE = 2"])
    writer = search.Writer(asked.config, asked.experiment)
    file = tmp_path / "winner.gin"
    file.write_text(writer.file(Candidate(Layout("tensor", (("tensor", 2),)), "full", 1, 8), []))
    built = loader.load(asked.path, bindings=[*asked.bindings, f"include '{file}'"], slice_name="v4-16").build()
    assert built.strategy.name == "tensor"


def piped(schedule, **arguments):
    return Layout("pipeline", (("stage", 2), ("data", -1)), Choice(schedule, tuple(arguments.items())))


# Layouts whose constructors have arguments that the experiment binds, and the candidate leaves at their defaults.
BOUND = [
    (Layout("fsdp", (("fsdp", -1),)), ["strategies.fsdp.overlap_reduction = True"]),
    (Layout("context", (("sequence", 2), ("fsdp", -1))), ["strategies.context.ring = True"]),
    (piped("circular", num_microbatches=4, repeats=2), ["schedules.circular.save = 'stage'"]),
    (piped("interleaved", num_microbatches=4, repeats=2), ["schedules.interleaved.save = 'stage'"]),
    (piped("zero_bubble", num_microbatches=4), ["schedules.zero_bubble.repeats = 2"]),
]


@pytest.mark.parametrize("path", ["gin/arrcoc/v5p_128.gin", "gin/trm/contrib01/contrib01_curriculum.gin"])
def test_fields_bound_to_the_number_of_steps_follow_the_batch_size(path):
    own = loader.load(path, bindings=["DATA = 'x'"] if "trm" in path else []).build()
    given = ["DATA = 'x'"] if "trm" in path else []
    asked = search.ask(path, slice_name=own.slice, bindings=given, batch_sizes=[own.batch_size // 2])
    candidate = Candidate(None, None, own.accum_steps, own.batch_size // 2)
    bindings = search.Writer(asked.config, asked.experiment).bindings(candidate)
    built = changes.load(path, bindings, bindings=given, slice_name=own.slice).build()
    wanted = search.apply(asked.of_rows(candidate.batch_size), candidate)
    assert (wanted.total_steps, wanted.model) == (2 * own.total_steps, built.model)
    assert wanted.model != own.model
    assert program_identity.layout_text(built) == program_identity.layout_text(wanted)


@pytest.mark.parametrize("chosen", ["STRATEGY", "experiment.Experiment.strategy"])
@pytest.mark.parametrize(("layout", "more"), BOUND, ids=lambda value: getattr(value, "constructor", ""))
def test_what_the_experiment_binds_does_not_change_a_candidate(layout, more, chosen, tmp_path):
    written = [f"strategies.{layout.constructor}.{name} = {degree}" for name, degree in layout.degrees]
    if layout.choice:
        schedule = f"schedules.{layout.choice.constructor}"
        written += [f"{schedule}.{name} = {value!r}" for name, value in layout.choice.arguments]
        written += [f"strategies.{layout.constructor}.schedule = @{schedule}()"]
    lines = [
        *(
            "from __gin__ import dynamic_registration",
            "from launch import experiment",
            "from parallel import strategies",
        ),
        *("from parallel.pipeline import schedules", "include 'gin/quickstart.gin'"),
        *(f"{chosen} = @strategies.{layout.constructor}()", *written, *more),
    ]
    file = tmp_path / "mine.gin"
    file.write_text("\n".join(lines))
    asked = search.ask(str(file), slice_name="v4-8")
    for tried in (layout, Layout("zero1", (("data", -1),))):
        candidate = Candidate(tried, None, 1, 32)
        bindings = search.Writer(asked.config, asked.experiment).bindings(candidate)
        built = loader.load(str(file), bindings=bindings, slice_name="v4-8").build()
        wanted = search.apply(asked.experiment, candidate)
        assert built.strategy == wanted.strategy != asked.experiment.strategy
        assert program_identity.layout_text(built) == program_identity.layout_text(wanted)


def test_names_tell_candidates_apart(options):
    names = [(one.name, one.candidate.batch_size) for one in options]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("experiment", "home"), [("gin/llama_3_1_8b_lora.gin", "transformer.preset"), ("gin/quickstart.gin", None)]
)
def test_a_decoder_with_adapters_is_planned_as_its_base_is(experiment, home):
    adapters = [] if home else ["from models import lora", "MODEL = @lora.adapted()"]
    adapters += [] if home else ["lora.adapted.model = @transformer.Transformer()"]
    asked = search.ask(experiment, slice_name="v4-8", bindings=adapters)
    writer = search.Writer(asked.config, asked.experiment)
    found = Changes(asked.config, asked.experiment.model).constructor("remat")
    assert found == (home or "transformer.Transformer")
    bindings = [*adapters, *writer.bindings(Candidate(None, "full", 1, asked.experiment.batch_size))]
    assert loader.load(experiment, bindings=bindings, slice_name="v4-8").build().model.remat == "full"
