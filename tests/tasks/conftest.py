"""Small corpora, and hosts as layouts."""

import json

import numpy as np
import pytest

from core.types import DataLayout


@pytest.fixture
def host_layouts():
    """The layouts of `hosts` hosts that share a batch, contiguous or strided."""

    def make(batch_size, hosts, strided=False):
        rows = np.arange(batch_size)
        parts = [rows[h::hosts] for h in range(hosts)] if strided else np.split(rows, hosts)
        return [DataLayout(batch_size, tuple(map(int, p)), tuple(map(int, p))) for p in parts]

    return make


@pytest.fixture
def global_batch():
    """Puts the rows of all hosts in their places."""

    def assemble(layouts, batches):
        whole = {}
        for layout, batch in zip(layouts, batches, strict=True):
            for key, values in batch.items():
                target = whole.setdefault(key, np.zeros((layout.batch_size, *values.shape[1:]), values.dtype))
                target[list(layout.rows)] = values
        return whole

    return assemble


def _documents(count):
    """Texts of 1 to some 60 bytes, each told apart by its number."""
    return [f"{i:03d}." + "abcdefghij"[i % 10] * ((i * 7) % 57) for i in range(count)]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """23 .txt files, train and validation."""
    folder = tmp_path_factory.mktemp("txt")
    for number, text in enumerate(_documents(23)):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def json_folder(tmp_path_factory):
    """3 .jsonl files of 100 lines, with a blank line in each."""
    folder = tmp_path_factory.mktemp("jsonl")
    texts = _documents(300)
    for number in range(3):
        lines = [json.dumps({"body": text, "n": i}) for i, text in enumerate(texts[number * 100 : (number + 1) * 100])]
        (folder / f"part-{number}.jsonl").write_text("\n".join([*lines[:50], "", *lines[50:]]) + "\n")
    return folder
