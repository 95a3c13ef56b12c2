"""`tests/run.sh lab folder_memory`: measures the host memory that reading a published model takes.

The folder has the sizes of a real model, and its files are sparse: they take no room on the disk and read as zeros. All
simulated hosts join, and host 0 reads its shards; the others would need the same.
"""

import argparse
import json
import math
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from core import logical, optimizers, slices, units
from core.batches import batch_shapes
from core.checkpoints import published, published_files, safetensors_files
from launch.environment import WORKSPACE
from models import pretrained
from models.decoder import transformer
from models.decoder.published import families, family_tensors
from parallel import strategies
from parallel.partitioner import Partitioner
from tasks import streams

HELP = "measure the host memory that reading a published model takes, with sparse files of its size"
EXAMPLE = "tests/run.sh lab folder_memory llama-3.1-8b v4-32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the slice, and what a simulated host needs to know."""
    parser.add_argument("model", metavar="PRESET", help="a name of models/decoder/presets.py")
    parser.add_argument("slice", metavar="SLICE")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Starts the hosts, and prints what host 0 measured."""
    jax.config.update("jax_platforms", "cpu")
    if args.host is not None:
        return _host(args)
    with socket.socket() as found, tempfile.TemporaryDirectory() as folder:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        write_sparse(transformer.preset(args.model), pathlib.Path(folder))
        found.close()
        command = [sys.executable, "-m", "tests.lab", "folder_memory", args.model, args.slice]
        command += ["--folder", folder, "--port", str(port), "--host"]
        hosts = [subprocess.Popen([*command, str(i)], cwd=WORKSPACE) for i in range(slices.get(args.slice).hosts)]
        return max(host.wait() for host in hosts)


def write_sparse(model: transformer.Transformer, folder: pathlib.Path) -> None:
    """Writes `config.json`, and `model.safetensors` in bfloat16 without content."""
    shapes, specs = logical.abstract_init(model.init, jax.random.key(0), batch_shapes(streams.batch_spec(1, length=8)))
    sources = family_tensors.named_sources(model)
    header, end = {}, 0
    for parameter in published._described(shapes, specs, sources, {"vocab": model.vocab_size}).values():
        shape = parameter.source.shape(parameter.sizes)
        for name in parameter.names:
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / safetensors_files.SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = families.config(model, families.family(model))
    (folder / published_files.CONFIG).write_text(json.dumps(config))


def _host(args: argparse.Namespace) -> int:
    slice_ = slices.get(args.slice)
    jax.config.update("jax_num_cpu_devices", slice_.devices // slice_.hosts)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", slice_.hosts, args.host)
    partitioner = Partitioner(strategies.fsdp(), slice=slice_, devices=jax.devices())
    unused = optimizers.adamw(learning_rate=optimizers.constant(0.0))
    program = partitioner.program(
        pretrained.model(args.folder), unused, streams.batch_spec(slice_.devices, length=32), seed=0
    )
    if args.host == 0:
        print(_measured(program, args.folder), flush=True)
    jax.distributed.shutdown()  # waits for host 0
    return 0


def _measured(program, folder: str) -> str:
    source = program.model.published(folder)
    abstract = program.abstract_state.params
    before, began = _peak_bytes(), time.monotonic()
    params = source.load(abstract, program.param_specs)
    seconds, peak = time.monotonic() - began, _peak_bytes() - before
    own = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    tensor = max(math.prod(t.shape) * np.dtype(t.dtype).itemsize for t in source._tensors.values())
    beyond = units.size(max(0, peak - own))
    return (
        f"host 0 holds {units.size(own)} of float32 shards; its peak rose by {units.size(peak)}, {beyond} beyond its "
        f"shards; the largest tensor has {units.size(tensor)}; {units.seconds(seconds)}"
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
