"""`tests/run.sh lab reference`: makes the pages of docs/reference/ whose facts are in the code."""

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from core import slices, types, units
from core.hosts import exit_codes
from launch import __main__ as cli
from launch import environment, experiment, settings
from launch.environment import WORKSPACE
from models.decoder import presets
from models.decoder.published import families
from parallel import strategies
from parallel.pipeline import schedules
from tests.lab import golden

HELP = "make the generated pages of docs/reference/; --write updates those that are not current"
EXAMPLE = "tests/run.sh lab reference --write"
FOLDER = WORKSPACE / "docs" / "reference"
GENERATED = "<!-- Made by tests/run.sh lab reference --write; not written by hand. -->"
REQUIRED = {"Model", "Batches", "Task", "AnswerJudge", "OwnMetrics"}  # Protocols of core.types that are not optional
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --write."""
    parser.add_argument("--write", action="store_true", help="update the pages")


def run(args: argparse.Namespace) -> int:
    """Lists the pages that are not current, and writes them if asked; returns 1 if any were left as they are."""
    stale = {name: page for name, page in pages().items() if page != _read(name)}
    for name, page in stale.items():
        if args.write:
            (FOLDER / name).write_text(page)
        print(f"docs/reference/{name}: {'written' if args.write else 'not current; add --write'}")
    return int(bool(stale) and not args.write)


def pages() -> dict[str, str]:
    """Returns the text of each generated page, by file name."""
    return {name: "\n".join([GENERATED, "", *make()]) + "\n" for name, make in MAKERS.items()}


def _read(name: str) -> str:
    path = FOLDER / name
    return path.read_text() if path.exists() else ""


def _table(head: list[str], rows: Iterator[list[str]] | list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _sentence(text: str) -> str:
    """Returns a text on one line, as a sentence; a * outside of code is not Markdown's."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    text = "".join(part if part[:1] == "`" else part.replace("*", r"\*") for part in parts)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def attributes(kind: type) -> dict[str, str]:
    """Returns what the section `Attributes` of a class's docstring says, by field."""
    section = inspect.getdoc(kind).partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def _commands() -> Iterator[str]:
    yield from ["# Commands", ""]
    yield "`launch/run COMMAND --help` prints the same options. `launch/pod.sh` is the command that starts training."
    helps = environment.declared("HELP")
    for family, title in cli.FAMILIES.items():
        yield from ["", f"## {title.partition(':')[0]}", ""]
        for name, module in cli.commands().items():
            if environment.declared("COMMAND")[module][0] == family:
                command = importlib.import_module(module)
                yield from [*_command(name, command, helps[module]), ""]


def _command(name: str, command, help_text: str) -> Iterator[str]:
    program = "launch/pod.sh" if name == "pod" else f"launch/run {name}"
    parser = cli.parser(command, program)
    example, _, more = command.EXAMPLE.partition("\n\n")
    yield from [f"### `{program}`", "", _sentence(help_text), "", "```"]
    yield from (re.sub(r" {2,}\((.*)\)$", r"    # \1", line.strip()) for line in example.splitlines())
    yield from ["```", "", *([_sentence(more), ""] if more else [])]
    yield from _options(parser)


def _options(parser: argparse.ArgumentParser, of: str = "") -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _options(child, f"{name} ")
        elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
            shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
            if isinstance(action.metavar, tuple):
                value = f" {' '.join(action.metavar)}"
            said = (action.help or _choices(action)).replace("%(default)s", str(action.default)).replace("%%", "%")
            yield f"* `{of}{shown}{value}`{': ' + _sentence(said) if said else ''}"


def _choices(action: argparse.Action) -> str:
    return f"one of {', '.join(map(str, action.choices))}" if action.choices else ""


def _macros() -> Iterator[str]:
    yield from ["# Macros of experiment files", ""]
    yield "`gin/defaults.gin` defines these macros. An experiment file sets only what differs, such as"
    yield '`BATCH_SIZE = 64`. `--gin "NAME = VALUE"` sets one on the command line.'
    yield ""
    text = (WORKSPACE / "gin" / "defaults.gin").read_text()
    for name, value, said in re.findall(r"^([A-Z_]+) = (.+?)(?: +# (.+))?$", text, re.MULTILINE):
        yield f"* `{name} = {value}`{': ' + _sentence(said) if said else ''}"


def _settings() -> Iterator[str]:
    yield from ["# Settings of an experiment", ""]
    yield "A gin file binds these as written here. `renga.Trainer` takes most of them as arguments"
    yield "([which](../how-to/python.md)), by the name of the field."
    yield "A setting without a default must be given; most have a [macro](gin-macros.md)."
    homes = {"experiment.Experiment": experiment.Experiment}
    homes |= {f"settings.{kind.__name__}": kind for kind in settings.GROUPS.values()}
    for home, kind in homes.items():
        said = attributes(kind)
        yield from ["", f"## `{home}`", "", _sentence(inspect.getdoc(kind).partition("\n")[0]), ""]
        for field in dataclasses.fields(kind):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if field.name in settings.GROUPS:
                continue
            value = "" if default is dataclasses.MISSING else f" = {default!r}"
            yield f"* `{home}.{field.name}{value}`: {_sentence(said[field.name])}"


def _strategies() -> Iterator[str]:
    yield from ["# Strategies", ""]
    yield "A strategy maps the logical axes of arrays to mesh axes. [Choose a strategy](../how-to/strategies.md) says"
    yield "when to use which; [logical axes and tables](../explanation/logical-axes.md) explains the notation."
    yield "An argument named after a mesh axis is the number of chips along it; -1 takes the remaining chips."
    yield "`save` says what a stage of a pipeline keeps for the backward pass."
    for name in strategies.__all__:
        make = getattr(strategies, name)
        if not inspect.isfunction(make) or name == "override":
            continue
        yield from ["", *_constructor(f"strategies.{name}", make)]
        if (WORKSPACE / "gin" / "strategies" / f"{name}.gin").exists():
            yield from ["", f"`gin/strategies/{name}.gin` selects it."]
    yield from ["", "## Schedules of pipelines", ""]
    yield "S is the number of stages, M of microbatches, R of repeats."
    for name in ("gpipe", "circular", "one_f_one_b", "interleaved", "zero_bubble"):
        yield from ["", *_constructor(f"schedules.{name}", getattr(schedules, name), level=3)]


def _constructor(name: str, make: Callable, level: int = 2) -> Iterator[str]:
    """A heading, the arguments with their defaults, and the docstring, whose line of notation is shown as code."""
    given = [
        p.name if p.default is p.empty else f"{p.name}={_shown(p.default)}"
        for p in inspect.signature(make).parameters.values()
    ]
    yield from [f"{'#' * level} `{name.rpartition('.')[2]}`", "", "```python", f"{name}({', '.join(given)})", "```", ""]
    for paragraph in inspect.getdoc(make).partition("\n\nArgs:")[0].split("\n\n"):
        if "→" in paragraph:
            yield from ["```text", *re.split(r";\s+", paragraph), "```", ""]
        else:
            yield from [" ".join(paragraph.split()), ""]


def _shown(value) -> str:
    if isinstance(value, schedules.Schedule):
        return "gpipe(8)"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _slices() -> Iterator[str]:
    yield from ["# Slices", ""]
    yield "`launch/run slices` prints this table. `NxSLICE`, such as `2xv4-32`, is a job of several slices."
    yield "`local` stands for the devices of this machine, and `h100:8x2` for 2 hosts with 8 GPUs each."
    yield ""
    yield "The number of a v4, v5p or tpu7x counts TensorCores, of which a chip has two; others count chips."
    yield "Each TensorCore of tpu7x is a JAX device with half of the chip's memory and FLOP/s."
    yield ""
    rows = (
        [
            f"`{s.name}`",
            *map(str, (s.chips, s.devices, s.hosts, s.topology_name)),
            units.significant(s.peak_flops / 1e15),
            _memory(s.hbm_bytes),
        ]
        for s in slices.SLICES.values()
    )
    yield from _table(["slice", "chips", "JAX devices", "hosts", "topology", "peak, bf16 PFLOP/s", "HBM"], rows)


def _memory(count: float) -> str:
    return f"{units.significant(count / GIB / 1024)} TiB" if count >= 1024 * GIB else f"{count / GIB:.3g} GiB"


def _exit_codes() -> Iterator[str]:
    yield from ["# Exit codes", ""]
    yield "`--restarts` starts a run again after the codes that are marked so."
    yield ""
    general = exit_codes._BY_SIGNAL._replace(meaning=exit_codes._BY_SIGNAL.meaning.format("N"))
    for code, said in [*exit_codes.ENDINGS.items(), ("128 + N", general)]:
        yield f"* **{code}**: {_sentence(said.meaning)}{' A restart can help.' if said.restart else ''}"


def abilities() -> list[type]:
    """Returns every Protocol of `core.types` that is optional."""
    found = [value for value in vars(types).values() if getattr(value, "_is_protocol", False)]
    return [value for value in found if value.__module__ == types.__name__ and value.__name__ not in REQUIRED]


def enables(ability: type) -> str:
    """Returns the paragraph of a docstring that says what an ability enables."""
    found = re.search(r"^Enables: (.*)\.$", inspect.getdoc(ability), re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _abilities() -> Iterator[str]:
    yield from ["# Abilities of models and tasks", ""]
    yield "A model needs `init`, `init_carry` and `loss`; a task needs what `core.types.Task` lists. More methods and"
    yield "fields add abilities. A message names what is missing: `TokenModel lacks the ability Shrinks: add"
    yield "shrink(multiples)`. The signatures are in `core/types.py`."
    yield ""
    for ability in abilities():
        adds = ", ".join(f"`{name}`" for name in types.missing(object(), ability))
        yield from [f"* **{ability.__name__}** enables {enables(ability)}. Add {adds}."]
    yield ""
    yield "An object that forwards unknown attributes (`__getattr__`) has the abilities of the object that it wraps."


def _experiments() -> Iterator[str]:
    yield from ["# Experiments", ""]
    yield "The header of each file says what it trains and how to run it. The table has the experiments that were"
    yield "compiled for their slice. **Times and MFU are predicted, never measured**"
    yield "([how, and how far off](../explanation/predictions.md))."
    yield ""
    records = {name: golden.read(name) for name in golden.files()}
    rows = (_experiment(record) for record in records.values())
    yield from _table(["experiment", "slice", "tokens a step", "GiB a chip", "s a step", "MFU, %"], rows)
    yield from ["", "What each file trains:", ""]
    named = {record["experiment"] for record in records.values()}
    for path in sorted((WORKSPACE / "gin").rglob("*.gin")):
        where = path.relative_to(WORKSPACE).as_posix()
        if where in named:
            head = re.match(r"(?:# .*\n)+", path.read_text())[0].replace("\n# ", " ").removeprefix("# ")
            yield f"* `{where}`: {_sentence(re.split(r'(?<=[a-z)])[.](?: |$)', head)[0])}"


def _experiment(record: dict) -> list[str]:
    memory, predicted = record["memory"], record["predicted"]
    times, shares = predicted["step_seconds"], predicted["mfu"]
    return [
        f"`{record['experiment']}`",
        record["slice"],
        f"{record['tokens_per_step']:,}",
        f"{memory['peak_bytes'] / GIB:.1f} of {memory['usable_bytes'] / GIB:.1f}",
        f"{times['scheduled']:.3g}",
        f"{100 * shares['scheduled']:.0f}",
    ]


def _families() -> Iterator[str]:
    yield from ["# Published families", "", "Hugging Face checkpoints of these families load directly:", ""]
    kinds: dict[str, list[str]] = {}
    for kind, one in families.known().items():
        kinds.setdefault(one.title, []).append(f"`{kind}`")
    differs = {one.title: one.differs for one in families.known().values()}
    rows = [[title, ", ".join(names), differs[title]] for title, names in kinds.items()]
    yield from _table(["family", "`model_type`", "differs from Llama by"], rows)
    yield from ["", *_ABOUT_FAMILIES.splitlines(), ""]
    if environment.declared("FOLDERS"):  # of an optional part
        yield from _families_of_images(importlib.import_module("models.vision.published"))
    yield "**Presets.** `MODEL = @transformer.preset()` with `transformer.preset.name = 'NAME'` makes a decoder of a"
    yield "published size, with other fields as bound. SmolLM3, Phi, OLMo, Granite, Gemma 4, Qwen3-Next and"
    yield "Qwen3.5 have none: their sizes are read from a folder. The names:"
    yield ", ".join(f"`{name}`" for name in presets.FIELDS) + "."


def _families_of_images(published: Any) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for kind, one in published.FAMILIES.items():
        rows.setdefault(one.title, [one.title, "", one.differs])[1] += f"`{kind}` "
    decoders = ", ".join(f"`{kind}`" for kind in published.DECODERS)
    yield from ["**Images and text.** `launch/run generate FOLDER --image FILE` reads these whole:", ""]
    yield from _table(
        ["family", "`model_type`", "before the decoder"], [[a, b.strip(), c] for a, b, c in rows.values()]
    )
    yield from ["", f"The decoder inside is one of {decoders}. Logits of tiny random models are within 5e-6"]
    yield from ["of transformers', relative to the largest entry, and gradients within 2e-5. Attention is causal.", ""]


_ABOUT_FAMILIES = """
For each family, logits of a tiny random model are within 5e-6 of transformers' in float64, relative to the largest
entry. Gradients are within 2e-5 ([tests](../results/published-models.md)). For Qwen3-Next and
Qwen3.5, whose layers amplify rounding in transformers, too, logits are within 4e-5 and gradients within 5e-4.

**Configuration.** Missing keys of `config.json` default to transformers' values; sizes are required. Every other key is
read as transformers reads it, is known to change no logits, or is an error with its name and value. Rotary scalings are
linear, Llama 3's, YaRN, LongRoPE and proportional. LongRoPE takes the factors of a row from its largest position.

**Weights.** Every tensor is read, listed by the run, or an error. A tied model may have `lm_head.weight` alone. If it
has both tensors, they must be equal. A number that is not finite is an error.

**Quantized weights.** The experts of gpt-oss in MXFP4 and the matrices of DeepSeek-V3 and Kimi K2 in FP8 blocks are
dequantized when they are read. An export has them in bfloat16 or float32. Other methods, such as GPTQ, AWQ and
bitsandbytes, and FP8 with one scale for a matrix, are errors.

**Not supported:** biases of attention in Llama, dynamic rotary embeddings, torch pickles, and added tokens for which
the model has no embedding, where they occur in a text. Dropout of GPT-2 is not applied.

**Qwen3-Next and Qwen3.5.** The language model is read. Vision and the heads for later tokens are listed, not read.

**DeepSeek-V3 and Kimi K2.** The correction of routers is frozen, and written in float32. Layers for later tokens are
listed, not read. Kimi K2 is exported as `deepseek_v3`, whose classes it uses.

**Gemma 4.** Models such as E2B, E4B, 12B, 31B and 26B-A4B are read; of models with images or sound, the language model.
The factor of each layer (`layer_scalar`) is frozen. An export is a `gemma4_text`. Pipelines and `overlap_reduction`
are errors for E2B and E4B, whose layers have inputs of their own. So are `vocab_size_per_layer_input` other than
`vocab_size`, and shared keys (`num_kv_shared_layers`) together with experts.

**Granite 4.** Models with attention in all layers and no experts are read. Layers with Mamba-2, and experts, are errors
that name the key. One with a rotary embedding is exported as `granite`, as Phi-4 is as `llama`: its logits are equal.

**Attention sinks of gpt-oss.** Plain attention, the splash kernel, a ring and generation support them. On GPUs
attention is plain: JAX gives cuDNN no sinks.

**Conversations of gpt-oss.** Its template formats an answer in another way when other messages follow. Write one
line for each answer, with the messages before it; the loss covers that answer only.

**Qwen 3 MoE with experts in some layers.** The shortest series of layers that repeats a whole number of times is a
group of the stack. One layer without experts at the start makes all layers one group. It is compiled layer by layer,
and pipelines cannot divide it.

**Memory of a host.** It needs memory for the shards of its chips and one tensor.

A family is one file in `models/families/`; `models/decoder/published/` reads and writes with it.
"""
MAKERS = {
    "published-families.md": _families,
    "commands.md": _commands,
    "gin-macros.md": _macros,
    "settings.md": _settings,
    "strategies.md": _strategies,
    "slices.md": _slices,
    "exit-codes.md": _exit_codes,
    "abilities.md": _abilities,
    "experiments.md": _experiments,
}
