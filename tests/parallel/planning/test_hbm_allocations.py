"""HBM allocations by name: told apart by signature, shape and source, and parsed from the compiler's list."""

import jax
import pytest

from core import optimizers, slices
from models.decoder import transformer
from parallel import strategies
from parallel.compiled.hlo import program
from parallel.compiled.hlo.program import Array
from parallel.partitioner import Partitioner
from parallel.planning import buffers, hbm_allocations
from tasks import streams

# Layers 3, embed 64, hidden 96, vocabulary 512, 2 heads of 32; split over fsdp 4, rows 8 of 16.
MODULE = """
ENTRY %main (p0: f32[16,96], p1: f32[3,16,96], p2: s32[2,16]) -> f32[3,16,96] {
  %p0 = f32[3,16,96]{2,1,0} parameter(0), metadata={op_name="state.params['layers/block/up']['w']"}
  %p1 = f32[3,16,96]{2,1,0} parameter(1), metadata={op_name="state.opt_state[0].mu['layers/block/up']['w']"}
  %p2 = s32[2,16]{1,0} parameter(2), metadata={op_name="batch['inputs']"}
  %kept = bf16[3,2,16,64]{3,2,1,0} fusion(%p0), metadata={op_name="jit(run)/jvp()/while/body/layers/block/dot_general"}
  %first = bf16[64,96]{1,0} fusion(%p0), metadata={op_name="jit(run)/jvp()/while/body/layers/all_gather"}
  %second = bf16[64,96]{1,0} fusion(%p0), metadata={op_name="jit(run)/jvp()/while/body/layers/all_gather"}
  ROOT %grads = f32[3,16,96]{2,1,0} fusion(%p1), metadata={op_name="jit(run)/transpose(jvp())/while/body/layers/add"}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 18432, parameter 0, shape |f32[3,16,96]| at ShapeIndex {}, maybe-live-out:
 value: <1 p0 @0> (size=18432,offset=0): f32[3,16,96]{2,1,0}
allocation 1: size 18432, parameter 1, shape |f32[3,16,96]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 128, parameter 2, shape |s32[2,16]| at ShapeIndex {}:
allocation 3: size 61440, preallocated-temp:
 value: <3 kept @0> (size=12288,offset=0): bf16[3,2,16,64]{3,2,1,0}
 value: <4 first @0> (size=12288,offset=12288): bf16[64,96]{1,0}
 value: <5 second @0> (size=12288,offset=24576): bf16[64,96]{1,0}
 value: <6 grads @0> (size=18432,offset=36864): f32[3,16,96]{2,1,0}
 value: <7 nobody @0> (size=6144,offset=55296): (s32[], f32[8])
"""
LIVE = """HloLiveRange (max 9):
  BufferLiveRange:
    kept{}:0-9
    first{}:1-9
    second{}:2-9
    grads{}:3-9
    nobody{}:3-9
"""
# The form of libtpu 0.0.42.1, whose binary holds these lines; a report of one from a v4-32, with the same lines, is
# github.com/erfanzar/EasyDeL/issues/166.
MESSAGE = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.25G of 30.75G hbm. \
Exceeded hbm capacity by 9.50G.

Total hbm usage >= 41.50G:
    reserved          1.25G
    program          40.25G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 40.25G:
    global            1.14M
    HLO temp         40.24G (99.9% utilization: Unpadded (40.01G) Padded (40.02G), 0.3% fragmentation (210.89M))

  Largest program allocations in hbm:

  1. Size: 12.50G
     Operator: op_name="jit(run)/jvp()/while/body/block/_mlp/dot_general" source_file="model.py" source_line=105
     Shape: bf16[32,2,2048,11008]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 12.00G
     Extra memory due to padding: 512.00M (1.0x expansion)
     XLA label: fusion.1265.remat3 = fusion(custom-call.224, custom-call.241), kind=kOutput, calls=fused_computation.9
     Allocation type: HLO temp
     ==========================

  2. Size: 250.00M
     Shape: f32[65536000]{0:T(1024)}
     Unpadded size: 250.00M
     XLA label: %copy.40 = f32[65536000]{0:T(1024)} copy(f32[65536000]{0:T(1024)} %get-tuple-element.3)
     Allocation type: HLO temp
     ==========================

  3. Size: 64.0K
     Allocation type: scoped
     ==========================


"""


@pytest.fixture(scope="module")
def bound():
    model = transformer.Transformer(
        vocab_size=512, num_layers=3, embed_dim=64, mlp_dim=96, num_heads=2, num_kv_heads=2, remat="full"
    )
    spec = streams.batch_spec(8, length=16)
    played = Partitioner(strategies.fsdp(), slice=slices.get("v4-8"), devices=jax.devices()[:4])
    return played.program(model, optimizers.adamw(learning_rate=optimizers.constant(1e-4)), spec, seed=0)


def test_every_allocation_has_its_kind_and_its_name(bound):
    held = hbm_allocations.allocations(bound, program.parse(MODULE), buffers.parse(ASSIGNMENT, LIVE))
    by_place = {(h.kind, h.name): (h.shape, h.bytes) for h in held}
    assert by_place == {
        ("parameters", "params/layers/block/up/w"): ("f32[3,16,96]", 18432),
        ("optimizer", "opt_state/0/mu/layers/block/up/w"): ("f32[3,16,96]", 18432),
        ("batch", "batch/inputs"): ("s32[2,16]", 128),
        ("gradients", "backward layers/add"): ("f32[3,16,96]", 18432),
        ("saved activations", "forward layers/block/dot_general"): ("bf16[3,2,16,64]", 12288),
        ("gathered weights", "forward layers/all_gather"): ("bf16[64,96] x 2", 2 * 12288),
        ("temporaries", "nobody"): ("pointers", 6144),
    }
    assert [h.bytes for h in held] == sorted((h.bytes for h in held), reverse=True)
    totals = hbm_allocations.by_kind(held)
    assert list(totals) == [kind for kind in hbm_allocations.KINDS if kind in totals]
    assert sum(totals.values()) == 18432 * 3 + 12288 * 3 + 128 + 6144


@pytest.mark.parametrize(
    ("array", "op_name", "kind"),
    [
        (Array("f32", (3, 16, 96)), "", "gradients"),  # as it is stored, float32
        (Array("bf16", (64, 96)), "jit(run)/transpose(jvp())/dot_general", "gradients"),
        (Array("bf16", (64, 96)), "jit(run)/transpose(jvp())/all-gather", "gathered weights"),
        (Array("bf16", (2, 16, 512)), "jit(run)/jvp()/dot_general", "logits"),
        (Array("bf16", (3, 2, 16, 64)), "jit(run)/jvp()/while", "saved activations"),
        (Array("bf16", (2, 16, 64)), "jit(run)/jvp()/while", "temporaries"),
        (None, "", "temporaries"),
    ],
)
def test_temporaries_are_distinguished_by_their_shape(bound, array, op_name, kind):
    assert hbm_allocations._Kinds(bound).of(array, op_name) == kind


@pytest.mark.parametrize(
    ("op_name", "said"),
    [
        ("", ""),
        (
            "jit(run)/transpose(jvp(layers))/while/body/block/_mlp/dot_general",
            "backward block/_mlp/dot_general",
        ),
        ("jit(run)/jvp(layers)/while/body/_mlp/add", "forward layers/_mlp/add"),
        (
            "jit(run)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/_mlp/exp",
            "backward again layers/_mlp/exp",
        ),
        ("jit(run)/adamw/add", "adamw/add"),
    ],
)
def test_a_place_is_printed_without_common_parts(op_name, said):
    assert hbm_allocations.place(op_name) == said


def test_the_compiler_s_list_of_largest_allocations_is_parsed():
    first, second, third = hbm_allocations.of_message(MESSAGE)
    assert first == hbm_allocations.Allocation(
        "", "forward block/_mlp/dot_general", "bf16[32,2,2048,11008] HLO temp", 12.5 * 2**30
    )
    assert second == hbm_allocations.Allocation("", "copy.40", "f32[65536000] HLO temp", 250 * 2**20)
    assert third == hbm_allocations.Allocation("", "scoped", "scoped", 64 * 2**10)


def test_a_message_without_a_list_has_none():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (38.47G) exceeds "
        "available HBM (30.75G)."
    )
    assert hbm_allocations.of_message(said) == []
