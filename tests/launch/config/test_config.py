"""The loader of experiment files, on a small package of constructors: what it accepts, and every mistake it finds."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launch import config
from launch.config import ConfigError, names, sources

MODULES = {
    "__init__": "",
    "strategies": """
        from __future__ import annotations

        import dataclasses
        from collections.abc import Mapping

        Rules = Mapping[str, str]
        DEGREES = (1, 2, 4)


        @dataclasses.dataclass(frozen=True)
        class Strategy:
            name: str
            mesh: tuple[int, ...] = ()


        def fsdp(*, data: int = 1, tensor: int = 1) -> Strategy:
            if data < 1:
                raise ValueError(f"fsdp: data is {data}, expected at least 1")
            return Strategy("fsdp", (data, tensor))


        def pipeline(*, stages: int = 2, schedule: str = "1f1b") -> Strategy:
            return Strategy("pipeline", (stages,))


        def _hidden() -> Strategy:
            return Strategy("hidden")
    """,
    "models": """
        from __future__ import annotations

        import dataclasses
        from typing import Literal


        @dataclasses.dataclass(frozen=True)
        class Decoder:
            width: int
            depth: int = 2
            dropout: float = 0.0
            remat: Literal["none", "full"] = "none"
            bias: bool = False
            names: list[str] = dataclasses.field(default_factory=list)
            sizes: tuple[int, ...] = ()
            note: str | None = None
            span: int = None

            def init(self):
                return self.width

            @classmethod
            def tiny(cls):
                return cls(width=8)
    """,
    "tasks": """
        from __future__ import annotations

        from collections.abc import Callable, Mapping, Sequence


        class Text:
            def __init__(self, vocabulary: str | None = None, *, length: int):
                self.vocabulary, self.length = vocabulary, length


        class Mixture:
            def __init__(self, *, parts: Sequence[Text], weights: Mapping[str, float] | None = None):
                self.parts, self.weights = list(parts), weights


        def checked(*, limit: int = 5) -> Text:
            try:
                {}["limit"]
            except KeyError:
                if limit < 5:
                    raise ValueError(f"the limit is {limit}")
            return Text(length=limit)


        def random(*, length: int = 8, make: Callable[[], Text] | None = None) -> Text:
            return make() if make else Text(length=length)
    """,
    "experiment": """
        from __future__ import annotations

        import dataclasses
        from typing import Protocol

        from toy import strategies, tasks


        class Model(Protocol):
            def init(self): ...


        @dataclasses.dataclass(frozen=True)
        class Experiment:
            strategy: strategies.Strategy
            model: Model
            batch_size: int
            task: tasks.Text | tasks.Mixture | None = None
            slice_name: str = "v4-8"
            rate: float = 1.0
    """,
}

DEFAULTS = """
    from __gin__ import dynamic_registration
    from toy import experiment

    SLICE = 'v4-8'
    STRATEGY = %gin.REQUIRED
    MODEL = %gin.REQUIRED
    TASK = None
    BATCH_SIZE = 8
    LENGTH = 16
    VOCABULARY = None
    LEARNING_RATE = 0.1
    experiment.Experiment.strategy = %STRATEGY
    experiment.Experiment.model = %MODEL
    experiment.Experiment.task = %TASK
    experiment.Experiment.batch_size = %BATCH_SIZE
    experiment.Experiment.slice_name = %SLICE
    experiment.Experiment.rate = %LEARNING_RATE
"""

EXPERIMENT = """
    # A toy.
    from __gin__ import dynamic_registration
    from toy import models
    from toy import strategies

    include 'defaults.gin'
    STRATEGY = @strategies.fsdp()
    MODEL = @models.Decoder()
    models.Decoder.width = 4
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "toy").mkdir()
    for name, text in MODULES.items():
        (folder / "toy" / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


class Bench:
    """A folder of gin files, read as an experiment of the toy package."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.write("defaults.gin", DEFAULTS)
        self.write("toy.gin", EXPERIMENT)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).strip() + "\n")

    def add(self, text):
        """Appends lines to the experiment; the first one is line 10."""
        with (self.folder / "toy.gin").open("a") as file:
            file.write(textwrap.dedent(text).strip() + "\n")

    def load(self, *bindings, path="toy.gin", **kwargs):
        return config.load(path, bindings=bindings, **self._where(kwargs))

    def problems(self, *bindings, path="toy.gin", **kwargs):
        try:
            self.load(*bindings, path=path, **kwargs)
        except ConfigError as error:
            return list(error.problems)
        return []

    def problem(self, *bindings, **kwargs):
        """The only problem."""
        found = self.problems(*bindings, **kwargs)
        assert len(found) == 1, "\n".join(map(str, found))
        return found[0]

    def _where(self, kwargs):
        return {"root": "toy.experiment.Experiment", "defaults": "defaults.gin"} | kwargs


@pytest.fixture
def bench(modules, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "WORKSPACE", tmp_path)
    monkeypatch.setattr(names, "PUBLIC_PACKAGES", ("toy",))
    return Bench(tmp_path)


# What is accepted.


@pytest.mark.covers("L02")
def test_builds_the_root(bench):
    config = bench.load()
    built = config.build()
    assert type(built).__name__ == "Experiment"
    assert (built.strategy.name, built.model.width, built.batch_size, built.rate) == ("fsdp", 4, 8, 0.1)
    assert type(built.model).__qualname__ == "Decoder"
    assert config.notes == ()


def test_loading_twice_in_one_process_keeps_the_two_apart(bench):
    first, second = bench.load("BATCH_SIZE = 2"), bench.load("STRATEGY = @strategies.pipeline()")
    assert first.build().batch_size == 2
    assert second.build().strategy.name == "pipeline"
    again = first.build()
    assert (again.batch_size, again.strategy.name) == (2, "fsdp")
    assert again == first.build()


def test_the_text_is_canonical_and_is_itself_an_experiment(bench):
    text = bench.load("strategies.fsdp.data = 2", "BATCH_SIZE = 4").text
    assert text == bench.load("BATCH_SIZE = 4", "strategies.fsdp.data = 2").text
    assert text != bench.load("BATCH_SIZE = 4").text
    assert "LENGTH" not in text  # nothing takes it
    bench.write("saved.gin", text)
    again = bench.load(path="saved.gin")
    assert again.text == text
    assert again.build() == bench.load("strategies.fsdp.data = 2", "BATCH_SIZE = 4").build()


def test_the_text_does_not_depend_on_how_the_modules_are_imported(bench):
    plain = bench.load().text
    bench.write("toy.gin", EXPERIMENT.replace("import strategies", "import strategies as s").replace("@strat", "@s #"))
    bench.write(
        "toy.gin", EXPERIMENT.replace("import strategies", "import strategies as s").replace("@strategies", "@s")
    )
    assert bench.load().text == plain


def test_the_text_keeps_imports_that_only_register(bench):
    plain = bench.load()
    bench.write("registers/models.py", "import sys\nsys.registered = True")
    bench.add("from registers import models as r\nimport registers_too")
    bench.write("registers_too.py", "")
    loaded = bench.load()
    added = {"models2": "registers.models", "registers_too": "registers_too"}
    assert loaded.imports == {**plain.imports, **added}
    assert [str(b) for b in loaded.bindings] == [str(b) for b in plain.bindings]
    bench.write("saved.gin", loaded.text)
    for module in added.values():
        del sys.modules[module]
    assert bench.load(path="saved.gin").text == loaded.text
    assert {*added.values()} <= sys.modules.keys()
    assert bench.load("from core import units").text == loaded.text  # a module of ours registers nothing


def test_the_bindings_are_data_with_their_places(bench):
    loaded = bench.load("strategies.fsdp.data = 2", "BATCH_SIZE = 4")
    found = {b.name: (b.value, b.place) for b in loaded.bindings}
    assert found["BATCH_SIZE"] == (4, "--gin #2")
    assert found["strategies.fsdp.data"] == (2, "--gin #1")
    assert found["models.Decoder.width"] == (4, "toy.gin:9")
    assert found["experiment.Experiment.rate"] == (config.Macro("LEARNING_RATE"), "defaults.gin:17")
    assert found["STRATEGY"] == (config.Reference("", "strategies.fsdp", True), "toy.gin:7")
    assert loaded.imports == {name: f"toy.{name}" for name in ("experiment", "models", "strategies")}


def test_a_saved_text_is_read_as_data_without_importing_what_it_names(bench):
    loaded = bench.load("strategies.fsdp.data = 2")
    read = config.parse(loaded.text)
    assert read.text == loaded.text
    assert read.imports == loaded.imports
    assert [(b.name, b.value) for b in read.bindings] == [(b.name, b.value) for b in loaded.bindings]
    elsewhere = config.parse("from nowhere import thing\n\nthing.make.size = 3\n")
    assert (elsewhere.imports, str(elsewhere.bindings[0])) == ({"thing": "nowhere.thing"}, "thing.make.size = 3")
    assert config.parse("").bindings == ()


def test_later_files_and_flags_override_earlier_ones(bench):
    bench.write("big.gin", "BATCH_SIZE = 64")
    bench.add("include 'big.gin'")
    assert bench.load().build().batch_size == 64
    bench.add("BATCH_SIZE = 65")
    assert bench.load().build().batch_size == 65
    assert bench.load("BATCH_SIZE = 66", "BATCH_SIZE = 67").build().batch_size == 67
    assert bench.load("include 'big.gin'").build().batch_size == 64  # the command line comes later, as it always does
    assert bench.load("include 'big.gin'", "BATCH_SIZE = 66").build().batch_size == 66
    assert bench.load("BATCH_SIZE = 66", "include 'big.gin'").build().batch_size == 64


def test_a_file_beside_the_including_one_comes_first_and_files_of_one_name_are_distinct(tmp_path, monkeypatch):
    """The user's own copy of a strategy, and an experiment with the name of one of the workspace."""
    own = tmp_path / "gin"
    (own / "strategies").mkdir(parents=True)
    (own / "strategies/fsdp.gin").write_text("include 'gin/strategies/hsdp.gin'\nBATCH_SIZE = 64")
    (own / "quickstart.gin").write_text("include 'gin/quickstart.gin'\ninclude 'strategies/fsdp.gin'")
    for folder in (tmp_path, tmp_path.parent):
        monkeypatch.chdir(folder)
        built = config.load(own / "quickstart.gin").build()
        assert (built.strategy.name, built.batch_size) == ("hsdp", 64)


def test_an_include_of_the_command_line_applies_what_it_includes_too(bench):
    bench.write("inner.gin", "BATCH_SIZE = 64")
    bench.write("combo.gin", "include 'inner.gin'")
    bench.write("mine.gin", "include 'inner.gin'")
    bench.add("include 'combo.gin'\nBATCH_SIZE = 32")
    assert bench.load().build().batch_size == 32
    for name in ("combo", "mine"):
        assert bench.load(f"include '{name}.gin'").build().batch_size == 64


def test_a_second_include_of_a_file_has_no_effect(bench):
    bench.write("task.gin", "include 'defaults.gin'\nBATCH_SIZE = 5")
    bench.write("toy.gin", EXPERIMENT + "    include 'task.gin'\n    LENGTH = 3\n    include 'defaults.gin'\n")
    bench.add("TASK = @tasks.random()\ntasks.random.length = %LENGTH\nfrom toy import tasks")
    built = bench.load().build()
    assert (built.batch_size, built.task.length) == (5, 3)


def test_includes_are_found_next_to_the_file(bench, tmp_path_factory, monkeypatch):
    bench.write(
        "parts/strategy.gin",
        "from __gin__ import dynamic_registration\nfrom toy import strategies\n"
        "strategies.fsdp.data = 2\ninclude 'more.gin'",
    )
    bench.write("parts/more.gin", "BATCH_SIZE = 9")
    bench.add("include 'parts/strategy.gin'")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    built = bench.load(path=bench.folder / "toy.gin", defaults=str(bench.folder / "defaults.gin")).build()
    assert (built.batch_size, built.strategy.mesh) == (9, (2, 1))


def test_the_slice_argument_wins(bench):
    bench.add("SLICE = 'v4-16'")
    assert bench.load().build().slice_name == "v4-16"
    assert bench.load("SLICE = 'v4-32'", slice_name="v4-64").build().slice_name == "v4-64"


def test_flags_know_the_imports_of_the_experiment_and_the_public_modules(bench):
    built = bench.load("STRATEGY = @strategies.pipeline()", "TASK = @tasks.random()").build()
    assert (built.strategy.name, built.task.length) == ("pipeline", 8)


def test_a_flag_may_import(bench):
    bench.write("flagged_strategy.py", "from toy import strategies\ndef mine(): return strategies.Strategy('mine')")
    for spelling in ("import flagged_strategy", "import flagged_strategy as flagged_strategy"):
        assert bench.load("STRATEGY = @flagged_strategy.mine()", spelling).build().strategy.name == "mine"
    bench.write("flagged/own.py", "from toy import strategies\ndef mine(): return strategies.Strategy('own')")
    assert bench.load("from flagged import own", "STRATEGY = @own.mine()").build().strategy.name == "own"


def test_a_module_next_to_the_experiment_is_as_good_as_ours(bench, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    bench.write(
        "neighbor_strategy.py",
        """
        from toy.strategies import Strategy
        def mine(*, degree: int = 2) -> Strategy:
            return Strategy("mine", (degree,))
    """,
    )
    bench.write(
        "toy.gin",
        EXPERIMENT.replace("from toy import strategies", "import neighbor_strategy").replace(
            "@strategies.fsdp", "@neighbor_strategy.mine"
        ),
    )
    bench.add("neighbor_strategy.mine.degree = 4")
    config = bench.load(path=bench.folder / "toy.gin", defaults=str(bench.folder / "defaults.gin"))
    assert config.build().strategy.mesh == (4,)


def test_two_modules_of_one_package_imported_in_full(bench):
    bench.add("import toy.tasks\nimport toy.strategies\nTASK = @toy.tasks.random()\ntoy.strategies.fsdp.data = 2")
    built = bench.load().build()
    assert (built.task.length, built.strategy.mesh) == (8, (2, 1))


def test_scopes_tell_two_uses_of_one_constructor_apart(bench):
    bench.add("""
        from toy import tasks
        TASK = @tasks.Mixture()
        tasks.Mixture.parts = [@a/tasks.Text(), @b/tasks.Text()]
        tasks.Mixture.weights = {'a': 1, 'b': 0.5}
        tasks.Text.vocabulary = 'bytes'
        a/tasks.Text.length = 1
        b/tasks.Text.length = %LENGTH
    """)
    task = bench.load().build().task
    assert [(part.length, part.vocabulary) for part in task.parts] == [(1, "bytes"), (16, "bytes")]
    assert type(task.parts[0]).__qualname__ == "Text"
    bench.add("c/tasks.Text.length = 3")
    assert "no effect" in bench.problem().what


def test_a_macro_is_read_in_the_scope_of_whoever_uses_it(bench):
    bench.add("""
        from toy import tasks
        TASK = @outer/tasks.Mixture()
        tasks.Mixture.parts = [%VOCABULARY]
        VOCABULARY = @tasks.Text()
        outer/tasks.Text.length = 7
    """)
    assert bench.load().build().task.parts[0].length == 7


def test_a_macro_whose_name_has_a_scope_is_read_by_that_name(bench):
    bench.add("""
        from toy import tasks
        TASK = @tasks.Mixture()
        tasks.Mixture.parts = [%big/TEXT]
        big/TEXT = @tasks.Text()
        tasks.Text.length = %big/LENGTH
        big/LENGTH = 7
    """)
    loaded = bench.load()
    assert loaded.build().task.parts[0].length == 7
    assert "big/LENGTH = 7" in loaded.text


def test_blocks_and_unevaluated_references(bench):
    bench.add("""
        from toy import tasks
        TASK = @tasks.random()
        tasks.random.make = @tasks.Text
        tasks.Text:
          length = 5
          vocabulary = '''one
        two'''
    """)
    task = bench.load().build().task
    assert (task.length, task.vocabulary) == (5, "one\ntwo")


def test_a_constructor_that_refuses_its_values_says_where_they_are(bench):
    bench.add("strategies.fsdp.data = 0")
    with pytest.raises(
        ConfigError, match=r"toy.gin:10: fsdp refuses its values: fsdp: data is 0, expected at least 1\n"
    ):
        bench.load().build()


def test_a_refused_macro_is_found_where_it_is_written(bench):
    bench.add("strategies.fsdp.data = %BATCH_SIZE\nBATCH_SIZE = 0")
    with pytest.raises(ConfigError, match=r"toy.gin:11: fsdp refuses"):
        bench.load().build()


def test_the_innermost_constructor_that_refuses_its_values_is_named(bench):
    bench.add("""
        from toy import tasks
        TASK = @tasks.Mixture()
        tasks.Mixture.parts = [@tasks.checked()]
        tasks.checked.limit = 1
    """)
    with pytest.raises(ConfigError) as error:
        bench.load().build()
    (problem,) = error.value.problems
    assert (problem.place, problem.what) == ("toy.gin:13", "checked refuses its values: the limit is 1")


def test_gin_keeps_quiet(bench, capfd, caplog):
    bench.load().build()
    bench.problems(path="nowhere.gin")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_macro_that_a_file_defines_and_reads_is_the_users_own(bench):
    bench.add("DEPTH = 6\nmodels.Decoder.depth = %DEPTH")
    assert bench.load().build().model.depth == 6
    assert bench.load("DEPTH = 7").build().model.depth == 7
    problem = bench.problem("models.Decoder.depth = 3", "DEPHT = 8")
    assert problem.place == "--gin #2"
    assert problem.what == "DEPHT is not one of the macros that defaults.gin declares, and nothing reads it"
    assert problem.expected.endswith("did you mean 'DEPTH'?")


# Choices that displace others.


def test_bindings_of_a_displaced_choice_are_left_out_with_a_note(bench):
    bench.add("strategies.fsdp.data = 2")
    config = bench.load("STRATEGY = @strategies.pipeline()")
    assert config.notes == (
        "toy.gin:10: strategies.fsdp.data = 2 is left out, --gin #1 chose STRATEGY = @strategies.pipeline()",
    )
    assert "fsdp" not in config.text


def test_a_displaced_choice_takes_its_macros_along(bench):
    bench.add("""
        from toy import tasks
        TASK = @tasks.Text()
        tasks.Text.vocabulary = %VOCABULARY
        tasks.Text.length = 4
        VOCABULARY = 'bytes'
    """)
    assert bench.load().build().task.vocabulary == "bytes"
    notes = bench.load("TASK = @tasks.random()").notes
    assert [note.split(":")[1] for note in notes] == ["12", "13", "14"]


def test_a_later_file_displaces_an_earlier_one(bench):
    head = "from __gin__ import dynamic_registration\nfrom toy import strategies\n"
    bench.write("one.gin", head + "STRATEGY = @strategies.fsdp()\nstrategies.fsdp.tensor = 2")
    bench.write("two.gin", head + "STRATEGY = @strategies.pipeline()\nstrategies.pipeline.stages = 4")
    bench.write("toy.gin", EXPERIMENT.replace("STRATEGY = @strategies.fsdp()", "include 'one.gin'"))
    assert bench.load().build().strategy.mesh == (1, 2)
    bench.add("include 'one.gin'")  # it has been read
    config = bench.load("include 'two.gin'")
    assert bench.load("include 'two.gin'", "include 'one.gin'").build().strategy.mesh == (1, 2)
    assert config.build().strategy.mesh == (4,)
    assert [note.split(" is")[0] for note in config.notes] == ["one.gin:4: strategies.fsdp.tensor = 2"]


@pytest.mark.parametrize("binding", ["strategies.pipeline.stages = 4", "LENGTH = 4"])
def test_a_binding_without_effect_is_a_mistake_when_nothing_displaced_it(bench, binding):
    bench.add(binding)
    problem = bench.problem()
    assert (problem.file, problem.line) == ("toy.gin", 10)
    assert "no effect" in problem.what
    assert binding in problem.actual


def test_a_flag_without_effect_is_a_mistake_even_beside_the_choice_that_displaced_it(bench):
    problem = bench.problem("strategies.fsdp.data = 2", "STRATEGY = @strategies.pipeline()")
    assert (problem.place, problem.actual) == ("--gin #1", "strategies.fsdp.data = 2")


def test_displaced_within_one_file_is_a_mistake(bench):
    bench.write(
        "one.gin",
        "from __gin__ import dynamic_registration\nfrom toy import strategies\nSTRATEGY = @strategies.pipeline()\n",
    )
    bench.write(
        "toy.gin", EXPERIMENT.replace("include 'defaults.gin'", "include 'defaults.gin'\n    include 'one.gin'")
    )
    bench.add("strategies.pipeline.stages = 4")
    assert "strategies.pipeline.stages has no effect" in bench.problem().what


# Mistakes, one by one: (lines added to the experiment, line of the mistake, words that its message must have).

MISTAKES = {
    "unknown include": (
        "include 'defualts.gin'", 10, ["there is no file 'defualts.gin'", "did you mean", "defaults.gin'"]
    ),
    "unknown include, nothing like it": ("include 'zzz/q.gin'", 10, ["there is no file 'zzz/q.gin'"]),
    "two values": ("models.Decoder.depth = 2 3", 10, ["text after the end of the statement"]),
    "bare word": ("models.Decoder.remat = full", 10, ["value full is not known", "quotes"]),
    "lower-case boolean": ("models.Decoder.bias = true", 10, ["write True"]),
    "unclosed bracket": ("models.Decoder.sizes = (1, 2\nBATCH_SIZE = 3", 10, ["not closed"]),
    "unclosed string": ("models.Decoder.remat = 'full\nBATCH_SIZE = 3", 10, ["string is not closed"]),
    "no value": ("models.Decoder.depth =\nBATCH_SIZE = 3", 10, ["cannot parse the value"]),
    "unhashable key": ("models.Decoder.depth = {[1]: 2}", 10, ["unhashable"]),
    "two imports in one": ("from toy import tasks, models", 10, ["one module", "one import statement for each"]),
    "a word alone": ("BATCH_SIZE", 10, ["not a statement"]),
    "missing module": ("import toyy", 10, ["no module toyy"]),
    "missing module of a package": (
        "from toy import strategys", 10, ["did you mean 'strategies'?", "import strategies"]
    ),
    "module of ours by a wrong path": ("import tasks_", 10, ["from toy import tasks"]),
    "import of a function": ("from toy.strategies import fsdp", 10, ["write strategies.fsdp"]),
    "one name for two modules": ("from os import path as models", 10, ["already the name of toy.models"]),
    "unknown constructor": (
        "strategies.fsdpp.data = 2", 10, ["no constructor 'fsdpp'", "did you mean 'fsdp'?", "one of"]
    ),
    "reference to an unknown constructor": (
        "TASK = @strategies.zzz()", 10, ["no constructor 'zzz'", "one of", "pipeline"]
    ),
    "not imported": ("TASK = @tasks.random()", 10, ["'tasks' is not imported", "from toy import tasks"]),
    "module left out": ("pipeline.stages = 3", 10, ["module.constructor", "write strategies.pipeline"]),
    "module misspelled": ("strategi.fsdp.data = 3", 10, ["not imported", "write strategies.fsdp"]),
    "private constructor": ("TASK = @strategies._hidden()", 10, ["private"]),
    "module as constructor": ("TASK = @strategies()", 10, ["module, not a constructor"]),
    "constant as constructor": ("TASK = @strategies.DEGREES()", 10, ["value (tuple), not a constructor"]),
    "alias as constructor": ("TASK = @strategies.Rules()", 10, ["not a constructor"]),
    "interface as constructor": ("from toy import experiment\nTASK = @experiment.Model()", 11, ["interface"]),
    "method as constructor": ("TASK = @models.Decoder.tiny()", 10, ["not a constructor of a module"]),
    "builtins of gin": ("TASK = @gin.singleton()", 10, ["'gin' is not imported"]),
    "unknown parameter": (
        "models.Decoder.dpeth = 3", 10, ["no parameter 'dpeth'", "did you mean 'depth'?", "Decoder.depth = 3"]
    ),
    "undeclared macro": ("BATCHSIZE = 3", 10, ["BATCHSIZE", "did you mean 'BATCH_SIZE'?", "BATCH_SIZE = 3"]),
    "macro in lower case": ("batch_size = 3", 10, ["did you mean 'BATCH_SIZE'?"]),
    "scoped macro": ("a/BATCH_SIZE = 3", 10, ["a/BATCH_SIZE is not one of the macros"]),
    "undefined macro": ("models.Decoder.depth = %DEPHT", 10, ["%DEPHT is not one of the macros"]),
    "undefined macro, near one": ("models.Decoder.depth = %LENGHT", 10, ["did you mean 'LENGTH'?"]),
    "duplicate parameter": (
        "models.Decoder.depth = 3\n\nmodels.Decoder.depth = 4", 12, ["twice", "line 10", "line 12"]
    ),
    "duplicate macro": ("BATCH_SIZE = 3\nBATCH_SIZE = 3", 11, ["twice", "lines 10 and 11"]),
    "duplicate under another name": (
        "import toy.models as m\nmodels.Decoder.depth = 3\nm.Decoder.depth = 4", 12, ["lines 11 and 12"]
    ),
    "string for int": ("models.Decoder.depth = '3'", 10, ["'3' (str)", "expected: int", "without quotes: 3"]),
    "int for string": (
        "strategies.fsdp.data = 1\nSLICE = 4", 11, ["slice_name", "4 (int)", "expected: str", "quotes: '4'"]
    ),
    "bool for int": ("models.Decoder.depth = True", 10, ["True (bool)", "expected: int"]),
    "int for bool": ("models.Decoder.bias = 1", 10, ["1 (int)", "expected: bool"]),
    "float for int": ("BATCH_SIZE = 8.0", 10, ["batch_size", "8.0 (float)", "expected: int", "write 8"]),
    "none for int": ("BATCH_SIZE = None", 10, ["None", "expected: int"]),
    "string for float": ("LEARNING_RATE = '1e-3'", 10, ["without quotes: 1e-3"]),
    "literal": ("models.Decoder.remat = 'dots'", 10, ["one of 'none', 'full'"]),
    "element of a list": ("models.Decoder.names = ['a', 3]", 10, ["element [1]: 3 (int)", "expected: list[str]"]),
    "list for tuple": ("models.Decoder.sizes = [1, 2]", 10, ["(list)", "tuple[int, ...]", "write a tuple: (1, 2)"]),
    "one for many": ("models.Decoder.sizes = (1)", 10, ["1 (int)", "write (1,)"]),
    "string for optional": ("models.Decoder.note = 3", 10, ["expected: str | None"]),
    "literal for a class": ("TASK = 'random'", 10, ["Experiment.task", "Text | Mixture | None"]),
    "literal for a function": (
        "from toy import tasks\nTASK = @tasks.random()\ntasks.random.make = 3", 12,
        ["tasks.random.make", "3 (int)", "expected: Callable[[], Text] | None"],
    ),
    "another class": (
        "TASK = @strategies.pipeline()", 10, ["which returns Strategy", "expected: Text | Mixture | None"]
    ),
    "constructor not called": ("from toy import tasks\nTASK = @tasks.random", 11, ["call it: @tasks.random()"]),
    "string for a list": (
        "from toy import tasks\nTASK = @tasks.Mixture()\ntasks.Mixture.parts = 'ab'", 12, ["Sequence[Text]"]
    ),
    "value of a mapping": (
        "from toy import tasks\nTASK = @tasks.Mixture()\ntasks.Mixture.parts = []\n"
        "tasks.Mixture.weights = {'a': 'b'}", 13, ["element ['a']: 'b' (str)"],
    ),
    "missing parameter": (
        "from toy import tasks\nTASK = @tasks.Text()", 11, ["no value for 'length'", "tasks.Text.length = …"]
    ),
    "macro of itself": ("BATCH_SIZE = %LENGTH\nLENGTH = %BATCH_SIZE", 11, ["refers to itself"]),
    "constructor of itself": (
        "from toy import tasks\nTASK = @tasks.Mixture()\ntasks.Mixture.parts = [@tasks.Mixture()]", 12, ["itself"]
    ),
}  # fmt: skip


@pytest.mark.covers("L02")
@pytest.mark.parametrize("name", MISTAKES)
def test_finds_the_mistake_and_nothing_else(bench, name):
    text, line, words = MISTAKES[name]
    bench.add(text)
    problem = next(iter(bench.problems()))
    assert (problem.file, problem.line) == ("toy.gin", line)
    assert not [word for word in words if word not in str(problem)], str(problem)
    rest = [str(p) for p in bench.problems()[1:]]
    assert not rest or name == "constructor of itself", rest
    with pytest.raises(ConfigError) as error:
        bench.load()
    assert str(problem) in str(error.value)
    assert error.value.problems == tuple(bench.problems())


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("STRATEGY = 'fsdp_tensor'", "write a constructor: @strategies.fsdp_tensor()"),
        (
            "optimizers.adamw.learning_rate = 1e-3",
            "write a constructor, such as @optimizers.constant() with optimizers.constant.value = 0.001",
        ),
        (
            "STRATEGY = @strategies.fsdp_tensor(tensor=2)",
            "@strategies.fsdp_tensor(), and on a line of its own: strategies.fsdp_tensor.tensor=2",
        ),
        (
            "transformer.Transformer.num_layers = 3",
            "import it at the top of the file: from models.decoder import transformer",
        ),
        ("Logging.log_interval = 3", "write settings.Logging"),
    ],
)
def test_a_fix_names_the_constructor_and_its_module(tmp_path, line, fix):
    imports = "from core import optimizers\nfrom launch import experiment\nfrom launch import settings\n"
    file = tmp_path / "mine.gin"
    file.write_text(f"{imports}from parallel import strategies\ninclude 'gin/quickstart.gin'\n{line}\n")
    with pytest.raises(ConfigError) as error:
        config.load(str(file))
    (problem,) = error.value.problems
    assert problem.fix == fix


def test_accepts_what_looks_like_a_mistake(bench):
    bench.add("""
        models.Decoder.dropout = 0
        models.Decoder.note = None
        models.Decoder.span = None
        models.Decoder.names = []
        models.Decoder.sizes = (1,)
    """)
    model = bench.load().build().model
    assert (model.dropout, model.note, model.sizes) == (0, None, (1,))


def test_an_int_is_accepted_if_it_satisfies_a_protocol(bench):
    problem = bench.problem("MODEL = @strategies.Strategy()", "strategies.Strategy.name = 'x'")
    assert "expected: Model" in str(problem)  # it has no init


def test_a_macro_without_value_is_named(bench):
    bench.write("toy.gin", EXPERIMENT.replace("STRATEGY = @strategies.fsdp()", ""))
    problem = bench.problem()
    assert problem.what == "STRATEGY has no value"
    assert problem.expected == "Strategy"
    assert "STRATEGY = … in toy.gin" in problem.fix


def test_a_misspelled_macro_does_not_seem_missing_as_well(bench):
    bench.write("toy.gin", EXPERIMENT.replace("STRATEGY = @s", "STRATGY = @s"))
    bench.add("strategies.fsdp.data = 2")
    assert "did you mean 'STRATEGY'?" in str(bench.problem())


def test_defaults_that_were_not_included(bench):
    bench.write("toy.gin", "LENGTH = 3\n")
    assert bench.problem().fix.startswith("begin with the line include 'defaults.gin'")
    bench.write("toy.gin", "# nothing yet\n")
    problem = bench.problem()
    assert (problem.place, "no value for strategy, model, batch_size" in problem.what) == ("toy.gin", True)
    bench.write("toy.gin", EXPERIMENT.replace("include 'defaults.gin'", "") + "    models.Decoder.depth = %LENGTH\n")
    assert any("%LENGTH is not defined" in p.what and "include 'defaults.gin'" in p.fix for p in bench.problems())


def test_a_value_above_the_include_that_sets_it_again(bench):
    bench.write("toy.gin", EXPERIMENT.replace("include", "BATCH_SIZE = 3\n    include"))
    problem = bench.problem()
    assert (problem.line, problem.fix) == (6, "move it below the include")


def test_names_in_a_statement_that_does_not_parse_are_in_use(bench):
    bench.write(
        "toy.gin", EXPERIMENT.replace("fsdp()", "fsdp(").replace("toy import models", "toy import models, tasks")
    )
    bench.add("strategies.fsdp.data = 2\nDEPTH = 3\nmodels.Decoder.depth = %DEPTH 4\nTASK = @tasks.random()")
    assert [p.line for p in bench.problems()] == [3, 7, 12]


def test_a_file_need_not_enable_dynamic_registration(bench):
    bench.write("toy.gin", EXPERIMENT.replace("from __gin__ import dynamic_registration", ""))
    assert bench.load().build().strategy.name == "fsdp"


def test_an_experiment_that_is_not_there(bench):
    problem = bench.problem(path="tyo.gin")
    assert (problem.file, problem.line) == ("tyo.gin", 0)
    assert "did you mean 'toy.gin'?" in problem.expected


def test_a_file_that_includes_itself(bench):
    bench.write("one.gin", "include 'two.gin'")
    bench.write("two.gin", "include 'one.gin'")
    bench.add("include 'one.gin'")
    problem = bench.problem()
    assert (problem.file, problem.line) == ("two.gin", 1)
    assert "is circular" in problem.what


def test_a_file_that_is_not_text(bench):
    (bench.folder / "bad.gin").write_bytes(b"X = '\xff'")
    bench.add("include 'bad.gin'")
    assert bench.problem().file == "bad.gin"


@pytest.mark.parametrize("sign", [":", ": ", " := ", " == "])
def test_another_sign_than_gins_between_a_name_and_its_value(bench, sign):
    bench.add(f"BATCH_SIZE{sign}64")
    assert bench.problem().fix == "BATCH_SIZE = 64"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "# Toy\n\nA toy.\n\n* one\n* two\n\nBATCH_SIZE = 4\n\nThe end\n"),
        ("toy.yaml", "".join(f"{name}: 1\n" for name in "abcdef")),
        ("toy.py", "import os\nimport sys\nimport re\nimport io\nimport abc\nx = 3\n" + "print(x)\n" * 4),
    ],
)
def test_a_file_of_another_kind_is_one_problem(bench, name, text):
    bench.write(name, text)
    problem = bench.problem(path=name)
    assert "not gin text" in problem.what
    assert "gin/quickstart.gin" in problem.fix


def test_a_message_shows_a_bounded_number_of_problems(bench):
    bench.add("".join(f"BATCH_SIZ{i} = 3\n" for i in range(30)))
    with pytest.raises(ConfigError, match=r"^30 mistakes in .*\n") as raised:
        bench.load()
    assert (len(raised.value.problems), str(raised.value).endswith("… and 10 more")) == (30, True)


def test_a_file_that_is_indented_and_does_not_parse(bench):
    (bench.folder / "toy.gin").write_text("  BATCH_SIZE = (2\n")
    assert (bench.problem().place, bench.problem().what) == ("toy.gin:1", "a bracket or a string is not closed")


def test_a_module_beside_the_experiment_may_be_a_link(bench):
    """As every file of a mounted ConfigMap of Kubernetes is."""
    bench.write(
        "real/linked_tasks.py", "import dataclasses\nfrom toy import tasks\ndef mine(): return tasks.random(length=2)"
    )
    (bench.folder / "linked_tasks.py").symlink_to(bench.folder / "real/linked_tasks.py")
    bench.add("import linked_tasks\nTASK = @linked_tasks.mine()")
    assert bench.load().build().task.length == 2


def test_a_module_that_another_one_shadows(bench):
    bench.write("textwrap.py", "def mine(): ...")
    bench.add("import textwrap\nTASK = @textwrap.mine()")
    problem = bench.problem()
    assert "not textwrap.py next to the experiment" in problem.what
    assert "a name of its own" in problem.fix


def test_a_module_that_fails_while_it_is_imported(bench):
    bench.write("failing_module.py", "x = 1\ny = undefined_name\n")
    bench.write("unparsable_module.py", "def f(:\n")
    bench.write("needy_module.py", "import something_not_installed\n")
    bench.write("raising_module.py", "x = 1\nraise SyntaxError('of another language')\n")
    modules = ("failing_module", "unparsable_module", "needy_module", "raising_module")
    bench.add("\n".join([*(f"import {name}" for name in modules), "TASK = @failing_module.task()"]))
    found = bench.problems()
    assert [p.line for p in found] == [10, 11, 12, 13]
    assert "NameError: name 'undefined_name' is not defined (failing_module.py:2)" in found[0].actual
    assert "SyntaxError" in found[1].actual
    assert "unparsable_module.py:1" in found[1].actual
    assert "something_not_installed" in found[2].actual
    assert "raising_module.py:2" in found[3].actual


def test_flags_may_have_space_around_them(bench):
    assert bench.load("  BATCH_SIZE=2 ", " \n").build().batch_size == 2
    assert bench.problem(" BATCH_SIZE = two").place == "--gin #1"


def test_flags_are_called_by_their_number(bench):
    found = bench.problems(
        "BATCH_SIZE = 2", "BATCHSIZE = 3", "strategies.fsdp.data = 'x'", "STRATEGY = @strategies.fsdp("
    )
    assert [p.place for p in found] == ["--gin #2", "--gin #3", "--gin #4"]
    assert str(found[0]).startswith("--gin #2: BATCHSIZE is not")


def test_a_slice_that_no_parameter_takes(bench):
    bench.write("defaults.gin", DEFAULTS.replace("experiment.Experiment.slice_name = %SLICE", ""))
    assert bench.problem(slice_name="v4-8").place == "--slice"


def test_a_slice_that_the_argument_cannot_override():
    given = ["from launch import experiment", "experiment.Experiment.slice = 'v4-32'"]
    with pytest.raises(ConfigError) as raised:
        config.load("gin/quickstart.gin", bindings=given, slice_name="v4-8")
    (problem,) = raised.value.problems
    assert (problem.place, problem.what) == ("--gin #2", "the SLICE argument 'v4-8' cannot override this binding")
    assert "experiment.Experiment.slice = %SLICE" in problem.fix
    assert config.load("gin/quickstart.gin", bindings=given).build().slice == "v4-32"
    for name in ("v4-32", "1xv4-32"):
        assert config.load("gin/quickstart.gin", bindings=given, slice_name=name).build().slice == "v4-32"


def test_after_a_mistake_strings_and_brackets_of_several_lines_are_read(tmp_path):
    lines = [
        "include 'gin/quickstart.gin'",
        "PROMPT = '''Once upon",
        "a time'''",
        "LENGTH = 12 8",
        "FROZEN = (",
        "'a',",
    ]
    (tmp_path / "a.gin").write_text("\n".join([*lines, "'b',", ")"]))
    with pytest.raises(ConfigError) as raised:
        config.load(str(tmp_path / "a.gin"))
    (problem,) = raised.value.problems
    assert problem.line == 4


def test_of_a_string_that_is_never_closed_its_first_line_is_named(tmp_path):
    (tmp_path / "a.gin").write_text("include 'gin/quickstart.gin'\nPROMPT = '''Once\nSEED = 7\nLENGTH = 128\n")
    with pytest.raises(ConfigError) as raised:
        config.load(str(tmp_path / "a.gin"))
    assert [problem.line for problem in raised.value.problems] == [2]


def test_a_file_in_a_folder_that_may_not_be_entered_is_a_problem(tmp_path, monkeypatch):
    def denied(call):
        def checked(path, *args, **options):
            if path.is_relative_to(tmp_path):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **options)

        return checked

    for name in ("is_file", "read_text"):
        monkeypatch.setattr(Path, name, denied(getattr(Path, name)))
    with pytest.raises(ConfigError, match=r"the file cannot be read(.|\n)*Permission denied"):
        config.load(str(tmp_path / "a.gin"))


def test_a_module_that_is_not_imported_is_reported_where_it_is_first_named_alone(tmp_path):
    lines = ["from __gin__ import dynamic_registration", "include 'gin/quickstart.gin'"]
    lines += ["STRATEGY = @strategies.fsdp_tensor()", "strategies.fsdp_tensor.tensor = 2", "SEED = 7"]
    (tmp_path / "a.gin").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as raised:
        config.load(str(tmp_path / "a.gin"))
    (problem,) = raised.value.problems
    assert (problem.line, problem.fix.rpartition(": ")[2]) == (3, "from parallel import strategies")


def test_all_mistakes_at_once(bench):
    bench.add("""
        include 'default.gin'
        strategies.fsdpp.data = 2
        models.Decoder.dpeth = 3
        BATCHSIZE = 3
        LENGTH = 32
        strategies.pipeline.stages = 4
        LEARNING_RATE = 'fast'
        models.Decoder.remat = full
        SLICE = 'v4-8'
        SLICE = 'v4-16'
        from toy import tasks
        TASK = @tasks.Text()
    """)
    found = bench.problems("modls.Decoder.depth = 3")
    lines = [p.line for p in found if p.file == "toy.gin"]
    assert lines == [10, 11, 12, 13, 14, 15, 16, 17, 19, 21], "\n".join(map(str, found))
    assert found[-1].place == "--gin #1"
    with pytest.raises(ConfigError, match=r"^11 mistakes in the configuration toy\.gin"):
        bench.load("modls.Decoder.depth = 3")


def test_nothing_is_constructed_and_no_gin_state_is_touched_by_a_check(bench):
    config = bench.load()
    bench.add("strategies.fsdp.data = 0")
    assert bench.problems() == []  # the constructor would have refused
    assert config.build().strategy.mesh == (1, 1)


def test_a_large_configuration_is_checked_quickly(bench):
    parts = "\n".join(f"part{i}/tasks.Text.length = {i}" for i in range(300))
    names = ", ".join(f"@part{i}/tasks.Text()" for i in range(300))
    bench.add(f"from toy import tasks\nTASK = @tasks.Mixture()\ntasks.Mixture.parts = [{names}]")
    bench.add(parts)
    began = time.perf_counter()
    assert bench.problems() == []
    assert time.perf_counter() - began < 3
    assert len(bench.load("TASK = @tasks.random()").notes) == 301


def test_the_loader_imports_no_jax():
    code = "import sys; from launch import config; print([m for m in ('jax', 'tensorflow') if m in sys.modules])"
    root = Path(config.__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_is_called_one():
    with pytest.raises(ConfigError) as error:
        config.load("gin")
    (problem,) = error.value.problems
    assert (problem.what, problem.expected) == ("'gin' is a folder", "a .gin file")
    assert problem.fix == "name a file in it, such as gin/first.gin"


@pytest.mark.parametrize(
    ("more", "slice_name", "found"),
    [((), None, "v4-16"), ((), "v4-8", "v4-8"), (("experiment.Experiment.slice = 'v4-32'",), None, "v4-32")],
)
def test_a_configuration_knows_its_slice_before_it_is_built(more, slice_name, found):
    assert config.load("gin/quickstart.gin", bindings=more, slice_name=slice_name).slice == found
