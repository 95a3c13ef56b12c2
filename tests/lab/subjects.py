"""Binds the models on which strategies are compared."""

from collections.abc import Mapping
from typing import Any

from core.types import Model
from models.agreement_subjects import optimizer_of
from parallel.partitioner import Program
from parallel.verify import agreement
from parallel.verify.agreement import Example


def bind(model: Model, example: Example, batch: Mapping[str, Any], **options: Any) -> Program:
    """Binds a model of `models.agreement_subjects`, with its optimizer, to the devices of an example."""
    return agreement.bind(model, optimizer_of(model), example, batch, **options)
