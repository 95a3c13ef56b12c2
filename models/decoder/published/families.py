"""Reads and writes the `config.json` of published families, the modules of `models/families/`."""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.checkpoints.published_files import CONFIG, read_object
from core.errors import UserError
from core.files import paths
from core.model_settings import differing_settings
from models.decoder import rotary
from models.decoder.config import DecoderConfig
from models.decoder.published import published_keys, rope_settings
from models.decoder.published.family import Config, Family

WITH_IMAGES = ("idefics3", "llava", "smolvlm")  # `model_type` of the models that `models.vision.published` reads


@functools.cache
def known() -> Mapping[str, Family]:
    """Returns the families by `model_type`."""
    package = __package__.removesuffix(".decoder.published")
    files = sorted((Path(__file__).parents[2] / "families").glob("[!_]*.py"))
    names = [file.stem for file in files if not file.stem.startswith("preset_")]
    modules = [importlib.import_module(f"{package}.families.{name}") for name in names]
    return {kind: family for module in modules for kind, family in module.FAMILIES.items()}


def fields(config: Config, *, where: str = CONFIG) -> dict[str, Any]:
    """Returns the fields of `Transformer` that a `config.json` describes.

    Absent keys have the values that transformers gives them.

    Raises:
      UserError: the file is wrong, or describes a model that the decoder cannot express.
    """
    kind = config.get("model_type")
    if said := of_images(config):
        raise UserError(f"{where}: model_type = {kind!r} {said}")
    if not isinstance(kind, str) or kind not in known():
        listed = ", ".join(sorted(known()))
        raise UserError(f"{where}: model_type = {kind!r} is not known; known are {listed}{_hint(config)}")
    family, problems = known()[kind], []
    text: Any = config
    if family.inside:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError(f"{where}: text_config = {text!r}: expected the configuration of the language model")
        problems = published_keys.problems(config, {"text_config", "tie_word_embeddings", *family.around})
        if (inner := text.get("model_type", family.inside)) != family.inside:
            problems.append(f"text_config has model_type = {inner!r}, expected {family.inside!r}")
        text = language_model(family, config)
    found = values(family, text)
    problems += published_keys.problems(text, {*family.keys, *family.aliases, *family.others}, family.quantized)
    problems += [line for key in family.keys if (line := family.problem(key, found[key]))]
    if problems:
        raise UserError(f"{where} (model_type {kind}): " + "; ".join(problems))
    try:
        return family.read(found)
    except UserError as error:
        raise UserError(f"{where} (model_type {kind}): {error}") from error


def language_model(family: Family, config: Config) -> Config:
    """Returns the entries of a configuration that describe the language model, with its `tie_word_embeddings`."""
    if not family.inside:
        return config
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", family.keys["tie_word_embeddings"])}
    return {**tied, **config["text_config"]} if family.ties_inside else {**config["text_config"], **tied}


def values(family: Family, config: Config) -> dict[str, Any]:
    """Returns a configuration with aliases resolved, and absent keys filled in."""
    aliases = {name: config[alias] for alias, name in family.aliases.items() if config.get(alias) is not None}
    return {**family.keys, **config, **aliases}


def of_images(config: Config) -> str:
    """Returns the end of a sentence about a configuration of a vision-language model; "" for other models."""
    if config.get("model_type") not in WITH_IMAGES:
        return ""
    return (
        "is a vision-language model, which launch/run generate FOLDER --image FILE reads, and "
        "gin/finetune_images.gin for fine-tuning. launch/run describe needs a language model"
        f"{_hint(config)}"
    )


def _hint(config: Config) -> str:
    inner = text.get("model_type") if isinstance(text := config.get("text_config"), Mapping) else None
    if isinstance(inner, str) and inner in known():
        return (
            f". Its text_config is a {inner}, which can be read: save the language model alone in a folder of its own, "
            "with transformers"
        )
    if config.get("auto_map"):
        return ". Its classes are programs in the folder (auto_map), which are never run"
    return ""


def read_config(folder: paths.Path) -> dict[str, Any]:
    """Reads the `config.json` of a folder. Raises UserError if it is missing or malformed."""
    file = folder / CONFIG
    if not file.exists():
        raise UserError(
            f"{folder} {f'has no {CONFIG}' if folder.exists() else 'does not exist'}: expected the folder of a "
            f"published model, with {CONFIG} and *.safetensors, or hf://OWNER/NAME"
        )
    return read_object(file)


def family(model: DecoderConfig) -> str:
    """Returns the `model_type` whose format expresses a decoder most closely, in products of any type.

    Raises:
      UserError: no family has these fields.
    """
    model = dataclasses.replace(model, quantization="none")
    found: list[tuple[bool, int, int, str, dict[str, tuple[Any, Any]]]] = []
    wanted = model.settings()
    for kind, one in known().items():
        if one.write is None:
            continue
        try:
            written = config(model, kind)
            again = DecoderConfig(**fields(written))
        except UserError:
            continue  # it lacks a part of the decoder, or has one that the decoder lacks
        wrong = differing_settings(again, model)
        found.append(
            (bool(wrong), len(wrong) + len(again.settings().keys() ^ wanted.keys()), len(written), kind, wrong)
        )
    if not found:
        raise UserError("no published family can express this decoder: each lacks one of its parts or settings")
    *_, nearest, wrong = min(found)
    wrong |= _of_no_family(model)
    if wrong:
        again = DecoderConfig(**fields(config(model, nearest)))
        own = {name: tuple(getattr(one, name, None) for one in (again, model)) for name in wrong}
        wrong |= {name: (theirs, ours) for name, (theirs, ours) in own.items() if theirs != ours}
        raise UserError(
            f"no published family has these fields; the nearest is {nearest}, which needs "
            + ", ".join(f"{name} = {theirs!r} (here {ours!r})" for name, (theirs, ours) in wrong.items())
        )
    return nearest


def differences(model: DecoderConfig, config: Config, *, where: str = CONFIG) -> list[str]:
    """Returns a line for each field in which a decoder differs from a `config.json`, which lines call `where`."""
    published = DecoderConfig(**fields(config, where=where))
    return [
        f"{name} = {theirs!r} in {where}, {ours!r} in the model"
        for name, (theirs, ours) in (differing_settings(published, model) | _of_no_family(model)).items()
    ]


def _of_no_family(model: DecoderConfig) -> dict[str, tuple[Any, Any]]:
    """Returns what a decoder computes, but no published model does: `{field: (their value, our value)}`."""
    found: dict[str, tuple[Any, Any]] = {}
    if model.attention == "none":
        found["attention"] = "auto", model.attention
    if model.planner is not None:
        found["planner"] = None, model.planner
    return found


def config(model: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the `config.json` of a decoder as a model of type `kind`.

    Raises:
      UserError: the family lacks something that the decoder has.
    """
    one = known()[kind]
    assert one.write is not None
    if isinstance(model.rope_scaling, rotary.LongRope) and rope_settings.ORIGINAL not in one.keys:
        raise UserError(f"model_type {kind} has no {rope_settings.ORIGINAL} of its own, which LongRoPE needs")
    heading = {"model_type": kind, "architectures": [one.architecture], "vocab_size": model.vocab_size}
    return heading | one.write(model)
