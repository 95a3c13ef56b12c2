"""Compares the settings of two models."""

import dataclasses
import inspect
from collections.abc import Hashable, Mapping
from typing import Any

from core.types import ChoosesDtype, ChoosesKernels, ChoosesRemat, ListsSettings, can


def differing_settings(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    """Returns `{setting: (their value, our value)}` for settings of both models that differ.

    Fields that choose how a model computes, such as its dtype, are left out unless the model lists them.
    """
    found, others = _settings(ours), _settings(theirs)
    return {name: (others[name], found[name]) for name in found if name in others and others[name] != found[name]}


def _settings(model: Any) -> Mapping[str, Any]:
    if can(model, ListsSettings):
        return model.settings()
    fields = (
        {f.name: getattr(model, f.name) for f in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else {}
    )
    for ability in (ChoosesDtype, ChoosesRemat, ChoosesKernels):
        fields = {name: value for name, value in fields.items() if name not in inspect.get_annotations(ability)}
    return {name: value for name, value in fields.items() if isinstance(value, Hashable)}  # arrays have no one answer
