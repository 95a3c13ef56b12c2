"""The library without launcher and gin: a model of stock Haiku modules, images, optax, a checkpoint and a warm start.

    JAX_PLATFORMS=cpu .venv/bin/python examples/minimal.py [RUN]

It runs from any folder, once `launch/setup.sh` has made `.venv`. Four CPU devices simulate a v4-8; on a TPU, leave
JAX_PLATFORMS out and set SLICE. On several hosts, start the same program on each, call `distributed.initialize()`
without arguments (JAX finds the other hosts of a slice), and replace the temporary folder by one that all hosts share.
RUN is a finished run, such as runs/quickstart-v4-16, or the folder of a published model, which then continues a text.
"""

import dataclasses
import itertools
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # a script finds only what is in its own folder

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from core import slices
from core.batches import Field
from core.checkpoints import steps, warm_start
from core.checkpoints.store import Checkpoints
from core.hosts import distributed
from core.optimizers import from_optax
from core.training import evaluation
from core.types import LossOutput
from models.haiku_model import HaikuModel
from parallel import strategies
from parallel.partitioner import Partitioner
from tasks.sampled import SampledTask

SLICE = slices.get("v4-8")  # 4 chips of one host: 4 JAX devices
STEPS, BATCH_SIZE = 20, 16
NAMES = {"*_0/w": ("embed", "mlp"), "*_0/b": ("mlp",), "*_1/w": ("mlp", None), "*_1/b": (None,)}


@dataclasses.dataclass(frozen=True)
class Bars(SampledTask):
    """Noisy images of 8 x 8 pixels with one bright row, whose number is the label."""

    num_streams: int = 4

    def spec(self, batch_size):
        """An image and a label for each row of a batch; the axes say that only rows may be sharded."""
        pixels = Field((batch_size, 8, 8), np.float32, ("batch", None, None))
        return {"pixels": pixels, "label": Field((batch_size,), np.int32, ("batch",))}

    def row(self, rng, *, is_training):
        """Draws one image and its label."""
        label, pixels = rng.integers(8, dtype=np.int32), rng.normal(size=(8, 8)).astype(np.float32)
        pixels[label] += 1
        return {"pixels": pixels, "label": label}


class Classifier(HaikuModel):
    """A multilayer perceptron of Haiku; `names` gives its parameters the axes by which strategies shard them."""

    names = NAMES

    def sums(self, batch, *, is_training):
        """Returns the sum of the losses of a batch, and the number of items."""
        logits = hk.nets.MLP([32, 8])(hk.Flatten()(batch["pixels"]))
        each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return LossOutput(jnp.sum(each), jnp.float32(each.size), {})


def program_of(strategy, optimizer):
    """Binds model, data and optimizer to the chips; raises UserError before anything is computed if they do not fit."""
    at = Partitioner(strategy, slice=SLICE, devices=jax.devices())
    return at.program(Classifier(), from_optax(transformation=optimizer), Bars().spec(BATCH_SIZE), seed=0)


def train(program, state):
    """Trains for STEPS steps; returns the state and the position in the data."""
    batches = Bars().train(program.partitioner.data_layout(BATCH_SIZE), seed=0)  # the rows of this host
    for step in range(1, STEPS + 1):
        state, metrics = program.train_step(state, program.put(next(batches)))  # the old state is donated
        if step % 10 == 0:
            print(f"step {step}  loss {metrics['loss']:.4f}")
    return state, batches.state()


def main():
    """Trains, saves, and trains the saved parameters under another strategy with another optimizer; then evaluates."""
    distributed.initialize(single_process=True, local_cpu_devices=SLICE.devices)  # before anything uses a device
    with tempfile.TemporaryDirectory() as run:
        program = program_of(strategies.fsdp(), optax.adamw(1e-2))
        state, position = train(program, program.init())
        checkpoints = Checkpoints(f"{run}/checkpoints", keep=1)
        checkpoints.save(STEPS, state=state, data=position, meta={})
        checkpoints.close()

        program = program_of(strategies.fsdp_tensor(tensor=2), optax.adan(1e-3))
        saved, shapes = warm_start.SavedParameters(steps.find(run)), program.abstract_state.params
        params = warm_start.load(saved, program.init_params, shapes, program.param_specs, patterns=["*"])
        state, _ = train(program, program.init_from(params))
    held_out = Bars().evaluation(program.partitioner.data_layout(BATCH_SIZE))
    print("validation:", evaluation.evaluate(program, state, itertools.islice(held_out, 4)))
    for name in sys.argv[1:]:
        from launch import loaded_model  # reads the run's gin configuration

        print(loaded_model.load(name).continued(["import "], max_tokens=20)[0].text)


if __name__ == "__main__":
    print(__doc__) if {"-h", "--help"} & set(sys.argv) else main()
