"""A seqio mixture trains on four simulated hosts, is killed, and continues bit for bit on two."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

from core.checkpoints import steps
from core.files import paths
from launch import environment

MODULE = """
import functools
import seqio, tensorflow as tf

vocabulary = seqio.ByteVocabulary()

def add(name, texts):
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(
                {"inputs": texts, "targets": texts}
            ),
            splits=["train", "validation"],
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={name: seqio.Feature(vocabulary, add_eos=name == "targets") for name in ("inputs", "targets")},
    )

add("letters", [chr(97 + n % 26) * (1 + n % 9) for n in range(300)])
add("digits", [str(n) for n in range(500)])
seqio.MixtureRegistry.add("both", [("letters", 3.0), ("digits", lambda task: 1.0)])
"""
GIN = """from __gin__ import dynamic_registration
from models.decoder import transformer
include 'gin/quickstart.gin'
include 'gin/tasks/seqio.gin'
TASK_NAME = 'both'
TASK_MODULE = 'own_mixture'
INPUTS_LENGTH = 12
DATA = '{cache}'
LENGTH = 24
BATCH_SIZE = 16
NUM_STREAMS = 4
TOTAL_STEPS = 12
WARMUP_STEPS = 2
CHECKPOINT_INTERVAL = 4
EVAL_INTERVAL = 12
PROMPT = ''
transformer.Transformer.num_layers = 1
transformer.Transformer.embed_dim = 32
transformer.Transformer.mlp_dim = 64
"""


@pytest.mark.slow
def test_a_mixture_is_killed_on_four_hosts_and_continues_on_two(tmp_path):
    (tmp_path / "own_mixture.py").write_text(MODULE)
    (tmp_path / "both.gin").write_text(GIN.format(cache=tmp_path / "cache"))

    def start(slice_, name):
        command = [*environment.COMMAND, "pod", slice_, str(tmp_path / "both.gin"), "--simulate", "--run-dir"]
        log = (tmp_path / f"{name}-{slice_}.log").open("w")
        return subprocess.Popen([*command, str(tmp_path / name)], stdout=log, stderr=log, start_new_session=True)

    def saved(name):
        folders = tmp_path.joinpath(name).glob("checkpoints/[0-9]*")
        return sorted(int(folder.name) for folder in folders if folder.name.isdigit())

    killed = start("v4-32", "killed")
    while not saved("killed") and killed.poll() is None:
        time.sleep(0.1)
    assert killed.poll() is None, pathlib.Path(tmp_path / "killed-v4-32.log").read_text()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    (last, *_) = reversed(saved("killed"))
    assert last < 12
    assert start("v4-16", "killed").wait() == 0, pathlib.Path(tmp_path / "killed-v4-16.log").read_text()
    assert start("v4-32", "whole").wait() == 0, pathlib.Path(tmp_path / "whole-v4-32.log").read_text()
    for step in saved("whole"):
        if step > last:
            shutil.rmtree(tmp_path / "whole/checkpoints" / str(step))
    assert start("v4-16", "whole").wait() == 0, pathlib.Path(tmp_path / "whole-v4-16.log").read_text()
    found, want = (steps.read(paths.resolve(tmp_path / name / "checkpoints" / "12")) for name in ("killed", "whole"))
    assert found.content == want.content
    assert found.streams == want.streams
