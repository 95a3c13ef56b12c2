"""Pictures of runs: what is drawn of the profile of a simulated host."""

import jax
import pytest

from core.training import trainer
from tests.lab import pictures

PROFILE = """
planes { name: "/host:CPU"
  lines { id: 0 name: "python"
    events { metadata_id: 1 offset_ps: 2000000000 duration_ps: 1 stats { metadata_id: 3 int64_value: 7 } } }
  lines { id: 1 name: "tf_XLATfrtCpuClient/1"
    events { metadata_id: 2 offset_ps: 3000000000 duration_ps: 4000000000
      stats { metadata_id: 1 str_value: "fusion.12" } stats { metadata_id: 2 int64_value: 3 } }
    events { metadata_id: 3 offset_ps: 7000000000 duration_ps: 1000000000
      stats { metadata_id: 1 str_value: "all-gather.4" } stats { metadata_id: 2 int64_value: 3 } }
    events { metadata_id: 4 offset_ps: 3000000000 duration_ps: 9000000000
      stats { metadata_id: 1 str_value: "while.1" } stats { metadata_id: 2 int64_value: 3 } } }
  event_metadata { key: 1 value { id: 1 name: "STEP" } }
  event_metadata { key: 2 value { id: 2 name: "fusion.12" } }
  event_metadata { key: 3 value { id: 3 name: "all-gather.4" } }
  event_metadata { key: 4 value { id: 4 name: "while.1" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "device_ordinal" } }
  stat_metadata { key: 3 value { id: 3 name: "step_num" } } }
planes { name: "Task Environment" stats { metadata_id: 1 uint64_value: 1000000000000 }
  stat_metadata { key: 1 value { id: 1 name: "profile_start_time" } } }
""".replace("STEP", trainer.STEP)


def test_a_chip_computes_and_takes_part_in_collectives():
    """A loop is not drawn: the operations inside it are."""
    text = jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    found = pictures.read_timeline(text)
    assert found.steps == {7: 1000.002}
    assert {*found.ran} == {3}
    assert {kind: spans for kind, [spans] in found.ran[3].items()} == {
        "computation": pytest.approx((1000.003, 1000.007)),
        "collectives": pytest.approx((1000.007, 1000.008)),
    }


def test_near_spans_are_joined():
    assert pictures.joined([(5, 6), (0, 2), (1, 3), (3.5, 4)], gap=0.5) == [(0, 4), (5, 6)]
    assert pictures.joined([(0, 5), (1, 2)], gap=0) == [(0, 5)]
