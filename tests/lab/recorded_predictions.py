"""Writes what the product has of golden records: the predictions that runs compare."""

import json
from collections.abc import Iterable
from typing import Any

from core.files import paths
from launch import predictions


def write(records: Iterable[dict[str, Any]]) -> None:
    """Writes the predictions of golden records; of records of the same training step, the first counts."""
    found: dict[str, Any] = {}
    for record in records:
        found.setdefault(record["fingerprint"], _of(record))
    lines = (f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in sorted(found.items()))
    paths.write_text_atomically(paths.resolve(predictions.FILE), "{\n" + ",\n".join(lines) + "\n}\n")


def _of(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "memory": {"peak_bytes": record["memory"]["peak_bytes"]},
        "predicted": {name: record["predicted"][name] for name in ("step_seconds", "mfu")},
        "versions": {"libtpu": record["versions"]["libtpu"]},
    }
