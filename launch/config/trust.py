"""The constructors that the configuration of a run may name without the user's consent.

An experiment file is the user's own, and may call anything. The configuration of a run can come from a stranger.
Therefore it may name only the constructors listed here, those of optax, and those of modules that the user's command
imports (`--gin "import MODULE"`). Importing a module of this workspace runs nothing, and is allowed. No constructor
that is listed here may start a program; the argument `module` of `text.seqio` is left out unless that module may be
imported.

Data of `text.tfds` can import modules that are not listed here: TensorFlow Datasets imports the modules of the feature
classes that files below `data_dir` name.
"""

import contextlib
import importlib
from collections.abc import Collection

from launch.config.signatures import Constructor
from launch.environment import PACKAGE

_NAMES = {
    "core.optimizers": (
        "adafactor adam_atan2 adamw averaged constant from_optax joined lion muon warmup_cosine warmup_floor "
        "warmup_linear with_table"
    ),
    "core.rematerialization": "OnHost",
    "launch.experiment": "Experiment Phase",
    "launch.loaded_model": "Choice",
    "launch.settings": "Checkpointing Evaluation Health Initialization Logging",
    "models.derivatives": "ClampedGate",
    "models.mixers.block_sparse": "BlockSparse",
    "models.decoder.attention.splash_tiles": "Tiles",
    "models.decoder.layer_inputs": "LayerInputs",
    "models.decoder.layers": "Attention Mlp",
    "models.decoder.experts": "Experts trained",
    "models.lora": "Lora adapted",
    "models.decoder.parts": "Sum",
    "models.decoder.planner_config": "Planner",
    "models.pretrained": "model",
    "models.decoder.rotary": "Linear Llama3 LongRope Proportional Yarn",
    "models.mixers.gated_delta": "GatedDelta",
    "models.mixers.latent_attention": "LatentAttention",
    "models.mixers.s5": "S5",
    "models.decoder.transformer": "Transformer preset",
    "models.trm": "Curriculum Linear TRM",
    "models.ttt.adapter": "adapted",
    "models.ttt.config": "TTTConfig",
    "models.ttt.gates": "Average Constant LossThreshold Random Reconstruction",
    "models.ttt.mixer": "TTTMixer",
    "models.vision.families": "pretrained",
    "models.vision.model": "VisionLanguageModel",
    "models.vision.pretrained": "image_input model",
    "models.vision.reader": "Reader",
    "models.vision.selector": "Selector",
    "models.vision.tower": "VisionTower",
    "parallel.pipeline.schedules": "circular gpipe interleaved one_f_one_b zero_bubble",
    "parallel.strategies": (
        "context data_parallel experts fsdp fsdp_tensor hsdp mesh3d multislice override pipeline pipeline_data "
        "pipeline_experts pipeline_fsdp pipeline_fsdp_tensor sequence_tensor tensor zero1"
    ),
    "tasks.chunked": "rows",
    "tasks.code.cached": "cached_hidden",
    "tasks.code.files": "code_files",
    "tasks.long_range": "rows",
    "tasks.puzzles": "dataset maze sudoku",
    "tasks.synthetic": "random_tokens",
    "tasks.text": "chats files huggingface mixture python_source seqio tfds tokens",
    "tasks.text.registered": "",
    "tasks.vision": "questions random_questions",
    "tasks.text.vocabularies": "Bytes bytes named sentencepiece tokenizer trained_sentencepiece",
}
CONSTRUCTORS = {module: frozenset(names.split()) for module, names in _NAMES.items()}
_OPTAX = "optax"
_FOLDERS = tuple(PACKAGE + name for name in ("core", "parallel", "models", "tasks", "launch"))


class Trust:
    """Decides what the configuration of a run may name: CONSTRUCTORS, optax and trusted modules."""

    def __init__(self, modules: Collection[str] = ()):
        """Trusts modules; of those of this project, CONSTRUCTORS alone says what may be named."""
        self._modules = frozenset(one for one in modules if not any(_is_within(one, ours) for ours in _FOLDERS))

    def also(self, modules: Collection[str]) -> "Trust":
        """Returns a copy that trusts further modules."""
        return Trust(self._modules | set(modules))

    def allows_import(self, module: str) -> bool:
        """Returns whether the module with this full name may be imported."""
        return any(_is_within(module, one) for one in (*_FOLDERS, _OPTAX)) or self._is_trusted(module)

    def allows(self, constructor: Constructor) -> bool:
        """Returns whether a constructor may be called: a listed one, also by the name of the module that defines it."""
        module = constructor.module
        if self._is_trusted(module) or any(_is_of(constructor, listed) for listed in CONSTRUCTORS):
            return True
        return _is_within(module, _OPTAX) and _is_within(str(constructor.target.__module__), _OPTAX)

    def allows_module(self, value: object) -> bool:
        """Returns whether a task may import the module with this name; None is allowed."""
        return value is None or (isinstance(value, str) and self.allows_import(value))

    def _is_trusted(self, module: str) -> bool:
        return any(_is_within(module, trusted) for trusted in self._modules)


def _is_of(constructor: Constructor, module: str) -> bool:
    if constructor.name not in CONSTRUCTORS[module]:
        return False
    with contextlib.suppress(ModuleNotFoundError):  # of a part that was left out
        return getattr(importlib.import_module(PACKAGE + module), constructor.name) is constructor.target
    return False


def _is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")
