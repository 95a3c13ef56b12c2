"""The pages of docs/results/: what each says of itself, and figures that have a record."""

import json
import re
from pathlib import Path

import pytest

from tests.lab import golden

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
STUDIES = sorted(page.stem for page in RESULTS.glob("*.md") if page.stem != "index")
CLAIMS = ("Claim", "Command", "Recorded", "Record", "Machine")

# Page, record of tests/golden, and text with its figures.
SHOWN = [
    ("experts", "mixtral_8x7b", "| `{file}` | none, 4 | {gib:.1f} | {mcycles:,.0f} | {hidden:.2f} – {exposed:.2f} |"),
    (
        "experts",
        "mixtral_8x7b",
        "| `{file}`, v5p-128 | {gib:.1f} | {mcycles:,.0f} | {hidden:.2f} – {scheduled:.2f} – {exposed:.2f} "
        "| {mfu_exposed:.0f} to {mfu_hidden:.0f}% |",
    ),
    (
        "experts",
        "qwen3_30b_a3b",
        "| `{file}`, v4-64 | {gib:.1f} | {mcycles:,.0f} | {hidden:.2f} – {scheduled:.2f} – {exposed:.2f} "
        "| {mfu_exposed:.0f} to {mfu_hidden:.0f}% |",
    ),
    ("experts", "mixtral_8x7b", "| {mcycles:,.0f} | {scheduled:.2f} | {gib:.1f} |"),
    ("experts", "qwen3_30b_a3b", "| {mcycles:,.0f} | {scheduled:.2f} |"),
    (
        "step-optimizations",
        "valkyrie_7b",
        "| Valkyrie-7B (`projections`), `fsdp` | {mcycles:.0f} | {gib:.2f} | 21.6 | {hidden:.3f} | {scheduled:.3f} "
        "| {exposed:.3f} |",
    ),
    ("step-optimizations", "valkyrie_7b", "| 32 | `projections` | {gib:.2f} | {mcycles:.0f} | {kernels:.3f} |"),
    (
        "step-optimizations",
        "valkyrie_7b_64_rows",
        "| 64 | `attention_and_mlp` | {gib:.2f} | {mcycles:,.0f} | {kernels:.3f} |",
    ),
    ("recursive-model", "trm-suite", "(`mixing`: the baseline) | {mcycles:.1f} | {milliseconds:.0f} | {gib:.1f} |"),
    ("pipelines-across-slices", "llama_3_1_70b_8xv5p_32", "overlap that the compiler scheduled | {scheduled:.2f} |"),
    ("pipelines-across-slices", "llama_3_1_70b_8xv5p_32", "hidden to none | {hidden:.1f} – {exposed:.1f} |"),
    ("pipelines-across-slices", "llama_3_1_70b_8xv5p_32", "GiB per chip at the peak | {gib:.1f} |"),
    ("pipelines-across-slices", "llama_3_1_70b_8xv5p_32", "if nothing hides it | {dcn:.2f} |"),
]  # fmt: skip


def figures(name):
    """The figures of a record of tests/golden as pages show them."""
    record = golden.read(name)
    predicted = record["predicted"]
    found = {
        "file": f"gin/{name}.gin",
        "gib": record["memory"]["peak_bytes"] / 2**30,
        "mcycles": record["cycles"]["total"] / 1e6,
        "milliseconds": record["cycles"]["total"] / 1.05e6,  # v4: 1.05 GHz
        "kernels": predicted["kernel_seconds"],
        "mfu": 100 * predicted["mfu"]["scheduled"],
        "dcn": sum(t["all"] for of, t in predicted["traffic_seconds"].items() if of.endswith("DCN")),
    }
    return found | predicted["step_seconds"] | {f"mfu_{of}": 100 * share for of, share in predicted["mfu"].items()}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_its_claim_command_date_record_and_machine(name):
    text = (RESULTS / f"{name}.md").read_text()
    said = dict(re.findall(r"^\* \*\*(\w+):\*\* (.*)$", text.partition("\n## ")[0], re.MULTILINE))
    assert tuple(said) == CLAIMS
    assert re.match(r"20\d\d-\d\d-\d\d, at revision [0-9a-f]{8}", said["Recorded"])
    assert f"]({name}.md)" in (RESULTS / "index.md").read_text()
    named = re.findall(r"`([\w./*-]+(?:\.json|/))`", said["Record"])
    assert said["Record"].startswith(("none: ", "the command writes ")) or named
    for path in named:
        folder = "tests/golden/" if "/" not in path else ""
        assert list(ROOT.glob(folder + path)), path


@pytest.mark.covers("E05")
@pytest.mark.parametrize(("page", "record", "text"), SHOWN)
def test_a_figure_of_a_page_is_that_of_its_record(page, record, text):
    assert text.format(**figures(record)) in (RESULTS / f"{page}.md").read_text()


@pytest.mark.covers("E05")
@pytest.mark.parametrize("base", ["smollm2_135m", "gpt2", "gemma3_1b", "gpt2_xl"])
def test_milliseconds_of_steps_with_test_time_training_are_those_of_their_records(base):
    (row,) = re.findall(
        rf"^\| {base} \| (.*) \| .* \| (.*) \| .* \|$", (RESULTS / "test-time-training.md").read_text(), re.MULTILINE
    )

    def shown(record):
        seconds = record["predicted"]["step_seconds"]
        ends = (f"{1000 * seconds[end]:.3g}" for end in ("hidden", "exposed"))
        return f"{' – '.join(ends)}, {record['memory']['peak_bytes'] / 2**30:.2f}"

    assert list(row) == [shown(golden.read(f"ponder-{base}{slice_}")) for slice_ in ("_v4_64", "")]


@pytest.mark.covers("E05")
def test_the_page_of_arithmetic_has_the_number_of_records():
    files = sorted((ROOT / "launch" / "plan" / "compiled").glob("*.json"))
    count = sum(len(json.loads(file.read_text())["records"]) for file in files)
    assert f"In the {count} committed records of {len(files)} experiments" in (RESULTS / "arithmetic.md").read_text()
