"""A small experiment to plan for, and records as if its candidates had been compiled."""

import pytest

from core import identity, versions
from launch import program_identity
from launch.plan import search
from parallel.planning import model_trace, records
from parallel.planning.records import Record

_CONSIDERED, _TRACED = {}, {}
_trace = model_trace.trace
EXPERIMENT, SLICE = "gin/quickstart.gin", "v4-8"
REVISION = "0123456789abcdef0123456789abcdef01234567-dirty"


def _traced_once(*arguments, slice, **options):
    key = slice.name, identity.text([arguments, options])
    if key not in _TRACED:
        _TRACED[key] = _trace(*arguments, slice=slice, **options)
    return _TRACED[key]


@pytest.fixture(autouse=True, scope="module")
def _tracing_once():
    """Tracing a model takes seconds, and most tests plan for the same few under various strategies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_trace, "trace", _traced_once)
        yield


@pytest.fixture
def considered_once(monkeypatch):
    """Judging all candidates takes a second, and most tests that ask for this ask of the same experiment."""
    options = search.options

    def remembered(question, *, only=()):
        text = program_identity.program_text(question.experiment, question.config)
        key = question.slice.name, text, tuple(question.batch_sizes), tuple(only)
        if key not in _CONSIDERED:
            _CONSIDERED[key] = options(question, only=only)
        return list(_CONSIDERED[key])

    monkeypatch.setattr(search, "options", remembered)


@pytest.fixture(scope="session")
def question():
    return search.ask(EXPERIMENT, slice_name=SLICE)


@pytest.fixture(scope="session")
def options(question):
    with pytest.MonkeyPatch.context() as patch:  # before the fixtures of a module
        patch.setattr(model_trace, "trace", _traced_once)
        return search.options(question)


@pytest.fixture(scope="session")
def compiled_as():
    """`compiled_as(option, factor=1.0) -> Record`: the estimate of arithmetic, as if it were compiled."""

    def build(one, factor=1.0):
        time = one.estimate.time
        return Record(
            records.COMPILED,
            needed_bytes=one.estimate.peak_bytes,
            time=time._replace(compute=time.compute * factor, kernels=time.kernels * factor),
            compile_seconds=12.0,
            made_with={
                **versions.installed(versions.COMPILER),
                "sources": records.sources_digest(),
                "revision": REVISION,
            },
        )

    return build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A user's own cache, and nothing that is committed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "nothing")
    return records.Store()


@pytest.fixture
def keep(cache):
    """`keep(text, record)`: as a worker leaves it in the cache."""
    return lambda text, record: records.write(cache.path(text), record.as_json())
