"""What the configuration of a run may name: the public constructors, and nothing that could run a program."""

import dataclasses
import importlib
import inspect
import sys
import typing

import pytest
from gin.config_parser import ImportStatement

from launch import config
from launch.config import ConfigError, sources, trust
from launch.config.signatures import why_not_a_constructor
from launch.config.statements import Binding, Reference, leaves
from launch.config.trust import Trust
from launch.environment import WORKSPACE
from models import lora
from models.decoder.attention import splash_tiles
from tasks.text import seqio_tasks  # noqa: F401 (defines a vocabulary)
from tests.lab import without

# What follows the imports of a saved configuration; a stranger can write anything instead.
STRANGE = {
    "a program": ("import os", "X = @os.system()\nos.system.command = 'true'", "os"),
    "a program under another name": ("import os as optimizers", "X = @optimizers.system()", "os"),
    "a module that registers": ("import antigravity", "", "antigravity"),
    "an internal module of ours": (
        "from core.files import paths",
        "X = @paths.write_text_atomically()",
        "core.files.paths",
    ),
    "a module inside one of ours": ("from tasks import chunked", "X = @chunked.dataclasses.replace()", "dataclasses"),
    "another function of a public module": (
        "from tasks.text import vocabularies",
        "X = @vocabularies.check_fits()",
        "tasks.text.vocabularies",
    ),
    "a library": ("from jax import numpy", "X = @numpy.save()", "jax.numpy"),
}


@pytest.fixture(scope="module")
def saved():
    """The configuration of a run, in canonical form."""
    return config.load("gin/quickstart.gin").text


def problems_of(text, allowed=()):
    with pytest.raises(ConfigError) as caught:
        config.load("runs/theirs/config.gin", text=text, trust=Trust(allowed))
    return caught.value.problems


def test_what_a_run_saves_is_read_as_it_is(saved):
    found = config.load("runs/mine/config.gin", text=saved, trust=Trust())
    assert found.text == saved
    assert found.build().batch_size == 16


@pytest.mark.parametrize("what", STRANGE)
def test_what_could_run_a_program_is_named_and_not_imported(saved, what):
    imports, bindings, module = STRANGE[what]
    before = set(sys.modules)
    found = [p for p in problems_of(f"{imports}\n{saved}{bindings}\n") if module.rpartition(".")[2] in p.fix]
    assert found
    assert "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize("flag", ["from tasks import text", "include 'gin/tasks/files.gin'", "from core import files"])
def test_a_flag_that_names_modules_of_ours_trusts_no_more_of_them(saved, flag):
    text = "from tasks.text import seqio_metrics\n" + saved
    text = text.replace("PROMPT = 'import '", "PROMPT = @seqio_metrics.require_metrics()")
    text += "seqio_metrics.require_metrics.name = 'a'\nseqio_metrics.require_metrics.module = 'antigravity'\n"
    with pytest.raises(ConfigError) as caught:
        config.load("runs/theirs/config.gin", text=text, trust=Trust(), bindings=[flag])
    assert any("seqio_metrics" in problem.what for problem in caught.value.problems)


def test_a_module_beside_a_run_is_not_imported(saved, tmp_path):
    (tmp_path / "left_by_a_stranger.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "config.gin").write_text("import left_by_a_stranger\n" + saved)
    with pytest.raises(ConfigError) as caught:
        config.load(str(tmp_path / "config.gin"), trust=Trust(["left_by_a_stranger"]))
    assert "there is no module left_by_a_stranger" in str(caught.value)


def test_a_run_includes_no_file(saved):
    (problem,) = problems_of("include 'gin/defaults.gin'\n" + saved)
    assert (problem.file, problem.line) == ("runs/theirs/config.gin", 1)


def test_a_trusted_module_is_imported_with_what_it_contains(saved, tmp_path, monkeypatch):
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "prompts.py").write_text("def prompt() -> str:\n    return 'def '\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "from theirs import prompts\n" + saved.replace("PROMPT = 'import '", "PROMPT = @prompts.prompt()")
    assert {p.fix.partition(", add ")[2] for p in problems_of(text)} == {'--gin "from theirs import prompts"'}
    by_flag = config.load("runs/theirs/config.gin", text=text, trust=Trust(), bindings=["from theirs import prompts"])
    assert by_flag.build().evaluation.prompt == "def "
    for allowed in ("theirs", "theirs.prompts"):
        found = config.load("runs/theirs/config.gin", text=text, trust=Trust([allowed]))
        assert found.build().evaluation.prompt == "def "


TASK = ["from tasks import text", "TASK = @text.seqio()", "text.seqio.module = %MODULE", "text.seqio.name = 'a'"]
TASK += ["MODULE = 'json.tool'", "text.seqio.length = %LENGTH", "text.seqio.num_streams = %NUM_STREAMS"]


def test_the_module_of_a_task_is_trusted_like_an_import():
    text = config.load("gin/quickstart.gin", bindings=TASK).text
    for trusted, flags, module in (
        ([], [], None),
        (["json"], [], "json.tool"),
        ([], ["from json import tool"], "json.tool"),
    ):
        found = config.load("runs/theirs/config.gin", text=text, trust=Trust(trusted), bindings=flags)
        assert found.build().task.corpus.asked.module == module


@pytest.mark.parametrize(
    "bindings",
    [
        [
            "from core.optimizers import rules",
            "from core.optimizers import schedules",
            "OPTIMIZER = @rules.lion()",
            "rules.lion.learning_rate = @schedules.constant()",
            "schedules.constant.value = 1e-3",
        ],
        ["from launch import phases", "PHASES = (@phases.Phase(),)", "phases.Phase.after = 3"],
        [
            "STRATEGY = @strategies.override()",
            "strategies.override.strategy = @strategies.fsdp()",
            "strategies.override.rules = {'heads': None}",
        ],
    ],
)
def test_a_constructor_may_be_named_by_the_module_that_defines_it(bindings):
    text = config.load("gin/quickstart.gin", bindings=bindings).text
    assert config.load("runs/theirs/config.gin", text=text, trust=Trust()).text == text


def test_constructors_of_optax_are_public():
    bindings = ["import optax", "OPTIMIZER = @optax.contrib.prodigy()"]
    text = config.load("gin/quickstart.gin", bindings=bindings).text
    found = config.load("runs/theirs/config.gin", text=text, trust=Trust())
    assert found.text == text
    assert "optax" in "".join(found.imports.values())


def test_flags_of_the_command_are_the_users_own(saved, tmp_path):
    (tmp_path / "more.gin").write_text("import string\nPROMPT = @string.capwords()\nstring.capwords.s = 'def '\n")
    included = [f"include '{tmp_path}/more.gin'"]
    found = config.load("runs/theirs/config.gin", text=saved, trust=Trust(), bindings=included)
    assert found.build().evaluation.prompt == "Def"


def test_every_constructor_of_the_experiments_is_public():
    named = {}
    for file in sorted([*(WORKSPACE / "gin").rglob("*.gin")]):
        statements = sources.parse(file.read_text())
        modules = {s.bound_name(): s.module for s in statements if isinstance(s, ImportStatement)}
        bindings = [s for s in statements if isinstance(s, Binding)]
        selectors = [b.selector for b in bindings if not b.is_macro]
        selectors += [leaf.selector for b in bindings for leaf in leaves(b.value) if isinstance(leaf, Reference)]
        for selector in selectors:
            symbol, _, name = selector.partition(".")
            named[modules[symbol], name] = file.name
    assert len(named) > 50
    missing = {key: file for key, file in named.items() if key[1] not in trust.CONSTRUCTORS.get(key[0], ())}
    assert not missing


FILES = {f"{module.replace('.', '/')}{end}": module for module in trust.CONSTRUCTORS for end in (".py", "/__init__.py")}
THERE = {module for file, module in FILES.items() if (WORKSPACE / file).exists()}


def test_the_list_names_constructors_that_exist():
    optional = {FILES[file] for part in without.PARTS for file in without.files_of(part, FILES)}
    assert set(trust.CONSTRUCTORS) - THERE <= optional
    for module in THERE:
        for name in trust.CONSTRUCTORS[module]:
            assert not why_not_a_constructor(getattr(importlib.import_module(module), name))


def test_what_a_constructor_takes_can_be_made():
    """Every class of ours in the signature of a listed constructor is listed, too, with all that extend it."""
    made, taken = set(), set()
    for module in THERE:
        for name in trust.CONSTRUCTORS[module]:
            constructor = getattr(importlib.import_module(module), name)
            results = _classes(_hints(constructor).get("return", constructor))
            made |= {_name(each) for each in results}
            parameters = inspect.signature(constructor).parameters.values()
            takes_fields = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            for each in (constructor, *(results if takes_fields else ())):
                fields = {field: hint for field, hint in _hints(each).items() if field != "return"}
                taken |= {found for hint in fields.values() for found in _classes(hint)}
    kinds = {each for found in taken for each in _extending(found) if dataclasses.is_dataclass(each)}
    ours = {_name(each) for each in kinds if each.__module__.partition(".")[0] in PRODUCT and each.__name__[0] != "_"}
    left_out = MADE_BY_A_PART if set(trust.CONSTRUCTORS) - THERE else set()
    assert {name.rpartition(".")[2] for name in ours - made} - left_out == MADE_OTHERWISE


PRODUCT = ("core", "models", "parallel", "tasks", "launch")
# By the listed functions `schedules.gpipe`, …, `text.chats` and `text.seqio`; and the base class of kinds of attention.
MADE_OTHERWISE = {"GPipe", "Circular", "OneFOneB", "Interleaved", "ZeroBubble", "ChatTask", "Heads", "SeqioVocabulary"}
MADE_BY_A_PART = {"ImageInput"}  # and taken by another part, which can be there without it


def _hints(constructor):
    return typing.get_type_hints(constructor, localns={"Tiles": splash_tiles.Tiles, "Lora": lora.Lora})


def _name(found):
    return f"{found.__module__}.{found.__qualname__}"


def _classes(hint):
    found = [hint] if inspect.isclass(hint) else []
    return [*found, *(each for part in typing.get_args(hint) for each in _classes(part))]


def _extending(found):
    return {found, *(each for part in found.__subclasses__() for each in _extending(part))}
