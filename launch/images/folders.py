"""Loads published models of images and text in two parts: the decoder, and what makes vectors of images for it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from core import stack, units
from core.errors import UserError
from launch import loaded_model, terminal
from launch.loaded_model import Images, LoadedModel
from models.vision import pretrained
from models.vision.model import VisionLanguageModel, part_of
from parallel.generation import text_part
from parallel.generation.generating import Vectors
from parallel.partitioner import Program
from parallel.strategy import Strategy
from tasks import streams
from tasks.vision import image_prompts, image_questions
from tasks.vision.image_prompts import ImagePrompts
from tasks.vision.image_questions import ImageQuestions
from tasks.vision.images import UnreadableImage
from tasks.vision.prepared import Frames

FOLDERS = ("idefics3", "llava", "smolvlm")  # `model_type` of folders that `load` loads
_GIN = "gin/generation/images.gin"
_DECODER = "decoder"
_MULTIPLE = 32  # of positions, in batches that only give the parameters their shapes


@dataclasses.dataclass(frozen=True)
class FolderSight:
    """Makes vectors of images with the tower and the connector of a model.

    Attributes:
      program: the whole model and its layout.
      params: the parameters of the tower and the connector; None before they are read.
      prompts: how images are prepared, and shown in prompts.
    """

    program: Program
    params: Any
    prompts: ImagePrompts

    @property
    def _model(self) -> VisionLanguageModel:
        model: Any = self.program.model
        return model

    def expanded(self, text: str, images: Images) -> str:
        """Repeats each image token of a prompt once for each vector of its image.

        Raises UserError unless there is one token for each image.
        """
        parts, token = self.prompts.parts(text), self.prompts.token
        has, given = units.counted(len(parts) - 1, "image token"), units.counted(len(images), "image")
        if len(parts) > 1 and not images:
            raise UserError(
                f"the prompt has {has} {token}, and no image is given: leave {token} out, or give --image FILE for "
                "each of them beside --prompt; conversations take no images"
            )
        if len(parts) - 1 != len(images):
            raise UserError(
                f"the prompt has {has} {token}, and {given} {'is' if len(images) == 1 else 'are'} given: expected "
                f"one {token} for each --image, as in --prompt 'USER: {token} What? ASSISTANT:'. With --chat they are "
                "written"
            )
        return self.prompts.expanded(parts, self._prepared(images))

    def check(self, ids: Sequence[int], images: Images) -> None:
        """Raises UserError unless the ids have one image token for each vector of the images."""
        have = list(ids).count(self.prompts.input.token_id)
        need = sum(len(frames.pixels) for frames in self._prepared(images)) * self._model.image_tokens
        if have != need:
            raise UserError(
                f"the prompt has the id {self.prompts.input.token_id} of an image token {have} times, and the "
                f"{units.counted(len(images), 'image')} given {'needs' if len(images) == 1 else 'need'} {need} of them"
            )

    def vectors(self, ids: Sequence[int], images: Images) -> Vectors | None:
        """Returns the vectors of the images of a prompt; None without images."""
        if not images:
            return None
        frames = np.concatenate([each.pixels for each in self._prepared(images)])
        shards = self.program.partitioner.row_shards
        padded = np.concatenate([frames, np.repeat(frames[:1], -len(frames) % shards, axis=0)])
        with self.program.partitioner.tracing(), stack.use_runner(stack.scan_runner):
            found = np.asarray(jax.device_get(self._compiled(self.params, padded)), np.float32)
        at = np.flatnonzero(np.asarray(ids) == self.prompts.input.token_id)
        return Vectors(at, found[: len(frames)].reshape(-1, found.shape[-1]))

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._model.image_vectors)

    def _prepared(self, images: Images) -> list[Frames]:
        return [_prepared(file, loaded_model.image_content(file), self.prompts) for file in images]


@functools.lru_cache(maxsize=32)  # a prompt is expanded, checked and run
def _prepared(file: str, content: bytes, prompts: ImagePrompts) -> Frames:
    try:
        return prompts.prepared(content)
    except UnreadableImage as error:
        raise UserError(
            f"{file} is not an image that can be read ({error}): expected a PNG or JPEG, for example"
        ) from error


def load(
    folder: str,
    slice_name: str | None,
    bindings: Sequence[str],
    dtype: str | None,
    strategy: Strategy | None,
    check: Callable[[], object],
    check_model: Callable[[LoadedModel], object],
) -> LoadedModel:
    """Loads a published model of images and text.

    Args:
      folder: the folder of the model.
      slice_name, bindings, dtype, strategy, check, check_model: as in `launch.loaded_model.load`.
    """
    choice = loaded_model.chosen(_GIN, folder, bindings, dtype, check)
    model: VisionLanguageModel = choice.model
    vocabulary = loaded_model.vocabulary_of(folder, vocab_size=model.decoder.vocab_size)
    layout = strategy or choice.strategy
    rows, multiple = loaded_model.sizes_for(layout, loaded_model.slice_of(slice_name), is_tiled=False)
    sizes = {"image_size": model.vision.image_size, "image_tokens": model.image_tokens}
    multiple = math.lcm(_MULTIPLE, multiple)
    length = -(-model.image_tokens // multiple) * multiple
    spec = image_questions.batch_spec(rows, length=length, has_kinds=False, **sizes)
    whole = loaded_model.bound(model, layout, slice_name, spec)
    text = loaded_model.bound(model.decoder, layout, slice_name, streams.batch_spec(rows, length=length))
    sight = FolderSight(whole, None, image_prompts.of(pretrained.image_input(folder), vocabulary))
    begins_with_bos = vocabulary is not None and vocabulary.begins_with_bos
    found = LoadedModel(text, None, vocabulary, folder, begins_with_bos, sight)
    check_model(found)
    source = model.published(folder)
    progress = terminal.progress(f"parameters of {folder}")
    params = source.load(loaded_model.in_compute_dtype(whole), whole.param_specs, progress=progress)
    of_text, of_sight = _of(params, of_decoder=True), _of(params, of_decoder=False)
    return dataclasses.replace(found, params=of_text, sight=dataclasses.replace(sight, params=of_sight))


def seeing(model: LoadedModel, task: Any) -> LoadedModel:
    """Returns the decoder of a run, with a `FolderSight` that makes vectors of images.

    It reads no images if `task` has no `prompts` for them, or the model has a selector of patches or attends to them
    in both directions.
    """
    whole: Any = model.model
    program, params = text_part.program_of(model.program), None
    if model.params is not None:
        program, params = text_part.of(model.program, model.params)
    decoder = dataclasses.replace(model, program=program, params=params)
    if not isinstance(task, ImageQuestions) or task.prompts is None or whole.selector is not None or not whole.causal:
        return decoder
    sight = FolderSight(model.program, model.params and _of(model.params, of_decoder=False), task.prompts)
    return dataclasses.replace(decoder, sight=sight)


def _of(params: Any, *, of_decoder: bool) -> Any:
    found: dict[str, dict[str, Any]] = {}
    for module, leaves in params.items():
        for name, leaf in leaves.items():
            if (part_of(f"{module}/{name}".replace("~/", "")) == _DECODER) is of_decoder:
                found.setdefault(module, {})[name] = leaf
    return found
