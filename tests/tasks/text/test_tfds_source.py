"""Names of TensorFlow Datasets: those with a namespace are refused, because their code would be downloaded and run."""

import sys

import pytest

from core.errors import UserError
from tasks import text
from tasks.text import tfds_source

NAMESPACES = ["kaggle:titanic", "huggingface:glue/cola", "some-one:mnist:1.0.0", "a:B", "a:_b"]


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_name_with_a_namespace_is_refused_before_tfds_sees_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # an import of it fails
    with pytest.raises(UserError, match=f"tfds: {name!r} has a namespace.*expected.*; prepare"):
        tfds_source.prepared(name, None)


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_is_a_problem_of_the_task(name):
    (problem,) = text.tfds(name=name, length=8, num_streams=1).problems()
    assert problem.setting == "text.tfds.name"
    assert name in problem.found
    assert problem.expected
    assert "data_dir" in problem.fix


@pytest.mark.parametrize("name", ["mnist", "mnist:3.0.1", "mnist:3.*.*", "mnist:*.*.*", "c4/en", "c4/en:3.1.0"])
def test_a_version_is_no_namespace(name):
    assert not text.tfds(name=name, length=8, num_streams=1).problems()
