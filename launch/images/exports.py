"""Exports models of images and text, as the folder of the published model that the run began with."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from core.checkpoints import image_processor, published_files, safetensors_files
from core.checkpoints import published as published_folders
from core.errors import UserError
from core.files import paths
from launch.experiment import Experiment
from launch.exported import Exported, Read
from models.decoder.published import families, family_tensors
from models.vision import published
from models.vision.model import VisionLanguageModel, part_of
from tasks.vision.image_questions import ImageQuestions

EXPORTS = "a model of images and text"


def exporter(model: Any) -> Callable[[str, Experiment, paths.Path, bool], Exported] | None:
    """Returns a function that makes the export; None if the model is not a `VisionLanguageModel`.

    Its arguments are the run, its experiment, the folder of the checkpoint, and whether to merge adapters.
    """
    return _exported if isinstance(model, VisionLanguageModel) else None


def _exported(run: str, experiment: Experiment, step: paths.Path, is_merged: bool) -> Exported:
    del step
    model: Any = experiment.model
    if model.lora is not None and not is_merged:
        raise UserError(f"{run}: adapters of a model of images and text are exported merged only: give --merge")
    if is_merged and model.lora is None:
        raise UserError(f"{run} has no adapters: leave --merge out")
    base = experiment.initialization.init_from
    config = {}
    if base and published_files.is_published(base):
        config = families.read_config(published_files.small_files(base))
    if (kind := str(config.get("model_type"))) not in published.FAMILIES:
        raise UserError(
            f"{run}: it did not begin with a published model of images and text (INIT_FROM = {base!r}), of which an "
            f"export has the config.json and the image processor; expected a folder of {', '.join(published.FAMILIES)}"
        )
    sources, kept = published.exported(model, base, config)

    def reads(read: Read) -> Read:
        merged = family_tensors.merged(read, model)  # matrices of the tower have the same names, and no adapters
        return lambda path, layer: (merged if part_of(path) == "decoder" else read)(path, layer)

    def others(dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in kept.items():
            part = tuple(slice(0, size) for size in tensor.shape)
            array = safetensors_files.Reader(tensor, [part])(part)
            if published_folders.is_float(array.dtype):
                published_folders.require_range(name, array, dtype)
                array = array.astype(dtype)
            yield name, array

    return Exported(
        kind,
        published_files.CONFIG,
        _without_dtype(config),
        sources,
        reads,
        others,
        files=_processor_files(published_files.small_files(base), experiment.task),
        note="without the selector: the folder's model reads all patches" if model.selector is not None else "",
    )


def _without_dtype(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return {key: _without_dtype(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _processor_files(folder: paths.Path, task: Any) -> dict[str, str]:
    found = {name: (folder / name).read_text() for name in published_files.PROCESSOR_FILES if (folder / name).exists()}
    prompts = task.prompts if isinstance(task, ImageQuestions) else None
    if prompts is None or prompts.input.processor.frame is None:
        return found
    for name in image_processor.FILES:
        if name in found:
            content = json.loads(found[name])
            inner = content.get("image_processor", content if name == published_files.PREPROCESSOR else None)
            if inner is not None:
                inner["do_image_splitting"] = False
                found[name] = json.dumps(content, indent=2) + "\n"
    return found
