"""What the compiler makes of every experiment file, recorded: tests/golden/NAME.json.

A record is what a change of code, of configuration or of the compiler may not change unseen: bytes, FLOPs, cycles,
traffic by mesh axis, and the seconds predicted from them. It holds no times of this machine, and its numbers are
rounded where they are predictions, so that equal programs have equal records and a change is a diff of a few lines.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core import paths, slices, units, versions
from launch import config, configuration, environment
from launch.experiment import Experiment
from launch.plans import records
from parallel import analysis, compiled
from parallel.planning import cost, label
from parallel.planning.cost import StepTime

FOLDER = environment.WORKSPACE / "tests" / "golden"
_GIN = environment.WORKSPACE / "gin"
_NO_EXPERIMENTS = ("defaults.gin",)


def files() -> dict[str, str]:
    """Every experiment that is recorded: its gin file, by the name of its record."""
    found = [p for p in sorted(_GIN.glob("*.gin")) if p.name not in _NO_EXPERIMENTS]
    found += [*sorted((_GIN / "published").glob("*.gin")), _GIN / "trm" / "suite.gin"]
    return {"-".join(p.relative_to(_GIN).with_suffix("").parts): f"gin/{p.relative_to(_GIN)}" for p in found}


def path(name: str) -> Path:
    """Where the record of an experiment is."""
    return FOLDER / f"{name}.json"


def read(name: str) -> dict[str, Any] | None:
    """A record; None where there is none."""
    file = path(name)
    return json.loads(file.read_text()) if file.is_file() else None


def write(name: str, record: Mapping[str, Any]) -> None:
    """Keeps a record."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    paths.write_text_atomically(paths.resolve(str(path(name))), text_of(record))


def text_of(record: Mapping[str, Any]) -> str:
    """A record as it stands in its file: sorted, a line for each value."""
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def difference(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What changed, as a unified diff; empty where nothing did."""
    texts = [text_of(record).splitlines(keepends=True) for record in (before, after)]
    return "".join(difflib.unified_diff(*texts, f"{name}.json recorded", f"{name}.json now", n=1))


def fingerprint(config_text: str, experiment: Experiment) -> str:
    """Equal for configurations whose steps cost the same, however they are written: 16 hexadecimal digits.

    What costs something it takes as built, so that a rehearsal with small sizes is something else; of the statements
    that make the optimizer it leaves out the learning rate.
    """
    settings = config.parse(config_text)
    costs = records.costing(experiment, settings)
    costs["optimizer"] = [str(b) for b in records.optimizer(settings) if not _is_rate(b)]
    return hashlib.sha256("\n".join(f"{name}: {value!r}" for name, value in costs.items()).encode()).hexdigest()[:16]


def _is_rate(binding: config.Binding) -> bool:
    """Whether it is a learning rate or what a schedule takes: they change how fast a step learns, not what it costs."""
    is_of_a_schedule = binding.selector.rpartition(".")[2] in records.SCHEDULES
    return not binding.scope and (binding.parameter == "learning_rate" or is_of_a_schedule)


def find(config_text: str, experiment: Experiment) -> dict[str, Any] | None:
    """The record of an experiment that costs what this one does; None where nothing is recorded of it."""
    wanted = fingerprint(config_text, experiment)
    recorded = (json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json")))
    return next((record for record in recorded if record["fingerprint"] == wanted), None)


def is_current(name: str) -> bool:
    """Whether the record of an experiment is there, of this configuration and this compiler."""
    record = read(name)
    if record is None or record["versions"] != versions.installed(versions.COMPILER):
        return False
    loaded = configuration.load(files()[name])
    return record["fingerprint"] == fingerprint(loaded.text, loaded.build())


def compile_record(file: str) -> dict[str, Any]:
    """Compiles an experiment for its slice and says all that is recorded of it.

    Raises:
      OutOfHbmError: it does not fit.
    """
    loaded = configuration.load(file)
    experiment = loaded.build()
    program = experiment.bind(compiled.devices_of(slices.get(experiment.slice)))
    found = analysis.analyze(program)
    said = analysis.as_json(program, found)
    del said["findings"]  # sentences of the report, not figures
    return said | {
        "experiment": file,
        "fingerprint": fingerprint(loaded.text, experiment),
        "versions": versions.installed(versions.COMPILER),
        "tokens_per_step": experiment.tokens_per_step,
        "flops_per_step": experiment.flops_per_step,
        "predicted": predicted(cost.step_time(found, program), experiment),
    }


def predicted(time: StepTime, experiment: Experiment) -> dict[str, Any]:
    """Seconds and shares of peak, to four digits.

    Raises:
      ValueError: more than the peak: the model of time or the count of FLOPs is wrong.
    """
    slice_, flops = slices.get(experiment.slice), experiment.flops_per_step
    bounds = {"hidden": time.hidden, "scheduled": time.scheduled, "exposed": time.exposed}
    return {
        "compute_seconds": _short(time.compute),
        "kernel_seconds": _short(time.kernels),
        "traffic_seconds": {
            f"{' '.join(axis.axes)} {axis.network}": {"all": _short(axis.seconds), "beside": _short(axis.beside)}
            for axis in time.traffic
        },
        "step_seconds": {bound: _short(seconds) for bound, seconds in bounds.items()},
        "mfu": {bound: _short(slice_.mfu(flops, seconds=s)) for bound, s in bounds.items()} if flops else {},
        "unpriced": list(time.unpriced),
    }


def write_published() -> None:
    """Tells `planning.label` what the records predict of runs whose speed is published, then every header."""
    published = label.rows()
    recorded = {row["name"]: record for row in published if (record := read(row["name"]))}
    label.write(label.with_predictions(published, {name: _speed(record) for name, record in recorded.items()}))
    write_headers()


def _speed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second and chip of a record, by bound."""
    per_chip = record["tokens_per_step"] / slices.get(record["slice"]).chips
    seconds = record["predicted"]["step_seconds"]
    return {bound: _short(per_chip / seconds[bound]) for bound in label.BOUNDS} | {
        "libtpu": record["versions"]["libtpu"]
    }


def write_headers() -> None:
    """Brings the lines `# Predicted: …` of experiment files up to their records, where a file has them."""
    for name, file in files().items():
        where, record = environment.WORKSPACE / file, read(name)
        if record is not None and (changed := with_header(where.read_text(), record)) != where.read_text():
            where.write_text(changed)


def with_header(text: str, record: Mapping[str, Any]) -> str:
    """A gin text with what is predicted of it in its header: a line `# Predicted:` and one that goes on, indented."""
    usable = units.size(record["memory"]["usable_bytes"], digits=4)
    lines = f"# Predicted: {figures(record)} of {usable} a chip; not run on a TPU\n#   ({label_of(record)}).\n"
    return re.sub(r"(?m)^# Predicted:.*\n(#   .*\n)*", lambda _: lines, text, count=1)


def line(record: Mapping[str, Any]) -> str:
    """`0.907 to 1.28 s per step, 48 to 68 % MFU, 18.4 GiB (compiled by libtpu …)`."""
    return f"{figures(record)} ({label_of(record)})"


def label_of(record: Mapping[str, Any]) -> str:
    """How far what a record predicts can be off."""
    return label.label(libtpu=record["versions"]["libtpu"])


def figures(record: Mapping[str, Any]) -> str:
    """The first half of `line`: what is predicted, between all traffic hidden and none."""
    seconds, mfu = record["predicted"]["step_seconds"], record["predicted"]["mfu"]
    ends = dict.fromkeys(units.significant(100 * share, 2) for share in (mfu["exposed"], mfu["hidden"])) if mfu else ()
    shares = f"{' to '.join(ends)} % MFU, " if ends else ""
    return (
        f"{units.seconds_between(seconds['hidden'], seconds['exposed'])} per step, {shares}"
        f"{units.size(record['memory']['peak_bytes'])}"
    )


def _short(number: float) -> float:
    return float(f"{number:.4g}")
