"""Renga as a library: `Trainer`, parts for its arguments, and `load` (docs/how-to/python.md)."""

from core import logical, optimizers, random_bits
from core.batches import Field
from core.errors import UserError
from core.types import LossOutput, WeightedSum
from launch.loaded_model import load
from launch.phases import Phase
from models.decoder import transformer
from models.haiku_model import HaikuModel
from parallel import strategies
from parallel.generation.sampling import Sampling
from renga.trainer import Trainer
from tasks import text
from tasks.sampled import SampledTask
from tasks.text import vocabularies

__all__ = [
    "Field",
    "HaikuModel",
    "LossOutput",
    "Phase",
    "SampledTask",
    "Sampling",
    "Trainer",
    "UserError",
    "WeightedSum",
    "load",
    "logical",
    "optimizers",
    "random_bits",
    "strategies",
    "text",
    "transformer",
    "vocabularies",
]
