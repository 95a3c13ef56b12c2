"""Predictions logged with measured steps, and warnings about differences."""

import dataclasses

import pytest

from core import slices
from core.slices import GIB
from launch.config import loader
from models import lora
from parallel import prediction as parallel_prediction
from parallel.planning import calibration
from parallel.prediction import SIMULATED, PredictionCheck

CONFIG = loader.load("gin/valkyrie_7b.gin")
EXPERIMENT = CONFIG.build()
RECORD = {
    "memory": {"peak_bytes": 10 * GIB},
    "predicted": {
        "step_seconds": {"hidden": 1.0, "scheduled": 1.2, "exposed": 1.4},
        "mfu": {"hidden": 0.61, "scheduled": 0.5, "exposed": 0.44},
    },
    "versions": {"libtpu": "0.0.42.1"},
}


@pytest.fixture
def measured(monkeypatch):
    error = calibration.Error(30, 0.05, 0.1, 0.2, shortest=1 / 1.2, longest=1.4 / 1.2)
    monkeypatch.setattr(calibration, "known_error", lambda: error)

    def make(*, record=RECORD, is_measured=True, hbm=10 * GIB):
        monkeypatch.setattr(parallel_prediction, "peak_hbm_bytes", lambda: hbm)
        warnings = []
        about = {"slice_": slices.get("v4-32"), "flops": EXPERIMENT.flops_per_step}
        return PredictionCheck(record, **about, is_measured=is_measured, warn=warnings.append), warnings

    return make


def test_a_simulation_is_labeled_and_compares_nothing(measured):
    found, warnings = measured(is_measured=False)
    assert found.rows()["predicted"].startswith("1.2 s (1 to 1.4 s) per step, 50 % MFU, 10 GiB (compiled by libtpu")
    assert found.rows()["measured"] == SIMULATED
    assert SIMULATED.startswith("simulated")
    assert found.metrics({"step_seconds": 1e-9}) == found.metrics({"step_seconds": 100.0}) == {}
    assert not warnings


def test_the_mfu_of_a_curriculum_is_that_of_its_cycles(measured):
    curriculum = ["from models import trm", "trm.TRM.curriculum = @trm.Curriculum()"]
    curriculum.append("trm.Curriculum.total_steps = %TOTAL_STEPS")
    trained = loader.load("gin/trm/sudoku4.gin", bindings=curriculum).build()
    steps = [trained.flops_between(n, n + 1) for n in (0, trained.total_steps - 1)]
    assert steps[0] < steps[1] == pytest.approx(trained.flops_per_step)
    found, _ = measured()
    mfu = [found.metrics({"step_seconds": 1.2}, flops=flops)["mfu"] for flops in steps]
    assert mfu[0] / mfu[1] == pytest.approx(steps[0] / steps[1])


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_matrices_have_no_gradient_to_count(tied):
    plain = loader.load("gin/quickstart.gin", bindings=[f"transformer.Transformer.tied = {tied}"]).build()
    frozen = dataclasses.replace(plain, frozen=("*",))  # adapters freeze all matrices, too, and the model counts them
    adapted = dataclasses.replace(plain, model=lora.adapted(model=plain.model))
    assert frozen.flops_per_step == adapted.flops_per_step < plain.flops_per_step
    without_products = dataclasses.replace(plain, frozen=("layers/*norm*", *([] if tied else ["embed*"])))
    assert without_products.flops_per_step == plain.flops_per_step
    assert dataclasses.replace(adapted, frozen=("layers/block/query",)).flops_per_step == adapted.flops_per_step


@pytest.mark.covers("O03", "O08")
def test_a_tpu_logs_both(measured):
    found, warnings = measured()
    assert found.rows()["measured"] == "step time, HBM and MFU follow with every report"
    values = found.metrics({"step_seconds": 1.2})
    assert values.pop("mfu") == pytest.approx(EXPERIMENT.flops_per_step / 1.2 / (16 * 275e12))
    assert values == {
        "hbm_gib": 10.0,
        "predicted/step_seconds": 1.2,
        "predicted/hbm_gib": 10.0,
    }
    assert not warnings


@pytest.mark.parametrize(
    ("seconds", "hbm", "warned"),
    [
        (0.76, 10.0, None),
        (1.74, 12.4, None),
        (1.76, 10.0, "measured 1.76 s per step, predicted 1 to 1.4 (compiled by libtpu 0.0.42.1; intervals from 30"),
        (0.74, 10.0, "measured 0.74 s per step"),
        (1.2, 12.6, "measured 12.6 GiB of HBM, predicted 10"),
        (1.2, 7.4, "measured 7.4 GiB of HBM"),
    ],
)
def test_more_than_a_quarter_apart_is_a_warning_once(measured, seconds, hbm, warned):
    found, warnings = measured(hbm=hbm * GIB)
    found.metrics({"step_seconds": 60.0})  # compiles
    assert not warnings
    for _ in range(3):
        found.metrics({"step_seconds": seconds})
    assert len(warnings) == (warned is not None)
    assert all(w.startswith(warned) for w in warnings)


def test_an_upper_bound_of_memory_may_be_far_above_the_measurement(measured):
    bound = {**RECORD, "memory": {"peak_bytes": 10 * GIB, "peak_is_bound": True}}
    for used, warned in ((2.0, 0), (12.6, 1)):
        found, warnings = measured(record=bound, hbm=used * GIB)
        assert "at most 10 GiB" in found.rows()["predicted"]
        for _ in range(2):
            found.metrics({"step_seconds": 1.2})
        assert len(warnings) == warned


def test_more_than_the_peak_is_left_out_with_one_warning(measured):
    found, warnings = measured()
    for _ in range(3):
        assert "mfu" not in found.metrics({"step_seconds": 0.5})
    about = [warning for warning in warnings if "MFU" in warning]
    assert len(about) == 1
    assert "% of its peak of" in about[0]
    assert "mfu" in found.metrics({"step_seconds": 1.2})


def test_without_a_record_nothing_is_compared(measured):
    found, warnings = measured(record=None, hbm=None)
    assert set(found.metrics({"step_seconds": 50.0})) == {"mfu"}
    assert not warnings


def test_a_program_without_a_record_is_reported(measured):
    rows = measured(record=None, is_measured=False)[0].rows()
    assert rows["predicted"].startswith("nothing: this program is not recorded; launch/run report v4-32 ")
    assert rows["measured"] == SIMULATED
