"""With the real compiler: a small plan, the same from records, and explanations of layouts that fit and do not."""

import re

import pytest

SMALL = (
    "transformer.Transformer.num_layers = 4",
    "transformer.Transformer.embed_dim = 512",
    "transformer.Transformer.mlp_dim = 1408",
    "LENGTH = 384",
)


def given(*bindings):
    return [part for binding in bindings for part in ("--gin", binding)]


def rows(said):
    return [line for line in said.splitlines() if re.match(r"\|\s+\d+ \|", line)]


@pytest.mark.slow
@pytest.mark.covers("X04")
@pytest.mark.compiled("v4-8")
def test_a_plan_is_compiled_once(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("plan", "v4-8", "gin/quickstart.gin", "--only", "fsdp", "hsdp", "--compile", "2", *given(*SMALL))
    first = launch(*arguments, timeout=900)
    assert len(rows(first)) == 2
    kept = sorted((tmp_path / "renga" / "plans").iterdir())
    assert len(kept) == 2
    again = launch(*arguments)
    assert rows(again) == rows(first)
    assert sorted((tmp_path / "renga" / "plans").iterdir()) == kept


@pytest.mark.slow
@pytest.mark.covers("X05", "X06")
@pytest.mark.compiled("v4-8")
def test_a_layout_is_explained(launch):
    said = launch(
        "plan", "v4-8", "gin/quickstart.gin", "--explain", "gin/strategies/fsdp.gin", *given(*SMALL), timeout=600
    )
    for kind in ("parameters", "optimizer", "gradients", "gathered weights"):
        assert re.search(rf"(?m)^  {kind} +[\d.]+$", said)
    assert re.search(r"parameters +\| params/layers/block/(gate|up|down)", said)
    assert "hottest operations" in said
    assert re.search(r"\| fsdp +\| ICI", said)
    assert re.search(r"limited by (computation|HBM|ICI): a step takes", said)


@pytest.mark.slow
@pytest.mark.covers("X13")
@pytest.mark.compiled("v4-8")
def test_a_layout_that_does_not_fit_is_explained(launch):
    choice = "gin/strategies/data_parallel.gin"
    bindings = given("BATCH_SIZE = 262144")
    said = launch("plan", "v4-8", "gin/quickstart.gin", "--explain", choice, *bindings, code=1, timeout=600)
    needed, over = re.search(r"needs ([\d.]+)GiB of 30.75GiB per chip, ([\d,.]+) GiB too much", said).groups()
    assert float(over.replace(",", "")) == pytest.approx(float(needed) - 30.75, abs=0.02)
    assert "largest allocations, as listed by the compiler" in said
    assert "f32[2,65536," in said
    assert re.search(r"nearest that may fit.*\n  data_parallel: data 4, remat none, accum \d+:", said)
