"""The decoder whose speed is measured: sizes, experiment file, and the rows and `remat` that planning chooses."""

from pathlib import Path
from typing import Any, NamedTuple

from core import slices
from launch.config import loader
from launch.experiment import Experiment
from parallel.planning import arithmetic, model_trace
from parallel.planning.sharded_state import ShardedState, Step
from tests.lab.on_accelerator.recorder import Request

SIZES = {"num_layers": 16, "embed_dim": 2048, "mlp_dim": 8192, "num_heads": 16, "num_kv_heads": 8}
VOCAB, LENGTH = 32768, 2048  # 1.14 billion parameters
SMALL = {"num_layers": 2, "embed_dim": 64, "mlp_dim": 176, "num_heads": 4, "num_kv_heads": 2}
SMALL_VOCAB, SMALL_LENGTH = 512, 64
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # of a device
PLANNED_IN_REHEARSAL = "h100:1"  # the table has no peak of a CPU
_TEXT = """
from __gin__ import dynamic_registration
from models.decoder import transformer

include 'gin/defaults.gin'
include 'gin/strategies/fsdp.gin'

EVAL_BATCHES = 0
LOG_INTERVAL = 5
WARMUP_STEPS = 10
TOTAL_STEPS = 1000
"""


class Choice(NamedTuple):
    """The rows and the `remat` that suit a device, with predicted memory and speed."""

    remat: str
    rows: int
    peak_bytes: float
    tokens_per_second: float

    @property
    def bindings(self) -> list[str]:
        """As bindings of gin."""
        return [f"transformer.Transformer.remat = '{self.remat}'", f"BATCH_SIZE = {self.rows}"]


def write(request: Request) -> Path:
    """Writes the experiment file into the folder of work."""
    sizes, vocab, length = request.sized((SIZES, VOCAB, LENGTH), (SMALL, SMALL_VOCAB, SMALL_LENGTH))
    bindings = [f"transformer.Transformer.{name} = {size}" for name, size in sizes.items()]
    bindings += [f"VOCAB_SIZE = {vocab}", f"LENGTH = {length}", f"NUM_STREAMS = {slices.get(request.slice).devices}"]
    file = Path(request.work, "decoder.gin")
    file.write_text("\n".join([_TEXT, *bindings]) + "\n")
    return file


def planned_for(request: Request) -> slices.Slice:
    """Returns the slice of predictions."""
    return slices.get(request.sized(request.slice, PLANNED_IN_REHEARSAL))


def choices(request: Request) -> list[Choice]:
    """Returns the rows and `remat` that fit by arithmetic, the fastest first; uses no device."""
    place = planned_for(request)
    first = f"BATCH_SIZE = {place.devices}"
    experiment: Any = loader.load(write(request), slice_name=place.name, bindings=[first]).build()
    spec = experiment.task.spec(experiment.batch_size)
    traced = model_trace.trace(experiment.model, experiment.optimizer, spec, slice=place)
    sharded = ShardedState(experiment.strategy, traced)
    found = []
    for remat in traced.works:
        for rows in ROWS if not request.is_rehearsal else ROWS[:4]:
            batch_size = rows * place.devices
            cost = arithmetic.estimate(sharded, Step(remat, batch_size, 1))
            if cost.peak_bytes <= place.chip.usable_hbm_bytes:
                speed = batch_size * experiment.row_length / cost.time.exposed
                found.append(Choice(str(remat), batch_size, cost.peak_bytes, speed))
    return sorted(found, key=lambda choice: -choice.tokens_per_second)


def experiment(request: Request, choice: Choice | None = None) -> Experiment:
    """Returns the experiment, with these rows and `remat`, on the devices of this machine."""
    bindings = choice.bindings if choice else [f"BATCH_SIZE = {slices.get(request.slice).devices}"]
    found: Any = loader.load(write(request), slice_name=request.slice, bindings=bindings).build()
    return found
