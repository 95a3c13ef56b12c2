"""Compares the settings of two models."""

import dataclasses
import inspect
from collections.abc import Hashable, Mapping
from typing import Any

from core.types import ChoosesDtype, ChoosesKernels, ChoosesRemat, ListsSettings, can


def differing_settings(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    """Returns `{setting: (their value, our value)}` for the settings that both models have and in which they differ.

    The settings of a dataclass without the ability `ListsSettings` are its fields, except those that describe how a run
    computes (the dtype, the kind of rematerialization and of attention, and chunks of the loss), and except values that
    are not hashable.
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
