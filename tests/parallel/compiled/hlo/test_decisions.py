"""Conditions of branches: equal on all chips, or possibly different."""

import pytest

from parallel.compiled.hlo import executions, program

CONDITIONAL = """
%once (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%x, %x)
}

%twice (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} tan(%x)
}

ENTRY %main (x: f32[8], p: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %p = s32[] parameter(1)
  ROOT %c = f32[8]{0} conditional(%p, %x, %x), branch_computations={%once, %twice}
}
"""


@pytest.mark.parametrize(
    ("decides", "depends_on"),
    [
        ("%p = s32[] constant(1)", "constant"),
        ("%id = u32[] partition-id()\n  %p = s32[] convert(%id)", "chip"),
        ('%p = s32[] custom-call(), custom_call_target="SliceId"', "slice"),
        ('%p = s32[] custom-call(), custom_call_target="Other"', "data"),
        ("%p = s32[] parameter(1)", "data"),
    ],
)
def test_dependencies_of_branch_conditions(decides, depends_on):
    text = CONDITIONAL.replace("%p = s32[] parameter(1)", decides)
    (branch,) = {b for e in executions.walk(program.parse(text)) for b in e.branches}
    assert branch.depends_on == depends_on


DECIDED_IN_A_LOOP = """
%cond (state: (s32[], s32[], f32[8])) -> pred[] {
  %state = (s32[], s32[], f32[8]) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(5)
  ROOT %goes_on = pred[] compare(%turn, %limit), direction=LT
}

%reduced (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
}

%left (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

%body (state: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %state = (s32[], s32[], f32[8]) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %flag = s32[] get-tuple-element(%state), index=1
  %x = f32[8]{0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%turn, %one)
  %after = s32[] TURN
  %zero = s32[] constant(0)
  %p = pred[] compare(%flag, %zero), direction=GT
  %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%reduced, false_computation=%left
  ROOT %out = (s32[], s32[], f32[8]) tuple(%next, %after, %c)
}

ENTRY %main (x: f32[8], flag: s32[]) -> (s32[], s32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %given = s32[] parameter(1)
  %zero = s32[] constant(0)
  %start = s32[] START
  %first = (s32[], s32[], f32[8]) tuple(%zero, %start, %x)
  ROOT %loop = (s32[], s32[], f32[8]) while(%first), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(
    ("start", "turn", "depends_on"),
    [
        ("constant(3)", "copy(%flag)", "constant"),
        ("constant(3)", "add(%flag, %one)", "counter"),
        ("copy(%given)", "copy(%flag)", "data"),  # carried unchanged, and data all the same
        ("copy(%given)", "add(%flag, %one)", "data"),
        ("convert(%given)", "copy(%turn)", "data"),
        ("partition-id()", "add(%flag, %one)", "chip"),
        ("constant(3)", "partition-id()", "data"),
    ],
)
def test_a_branch_in_a_loop_depends_on_what_the_loop_starts_with(start, turn, depends_on):
    text = DECIDED_IN_A_LOOP.replace("START", start).replace("TURN", turn)
    found = executions.walk(program.parse(text))
    assert {b.depends_on for e in found for b in e.branches} == {depends_on}


def test_one_computation_called_twice_depends_on_each_argument():
    text = CONDITIONAL.replace(
        "%p = s32[] parameter(1)",
        "%given = s32[] parameter(1)\n  %three = s32[] constant(3)\n  %f = s32[] call(%three), to_apply=%same\n"
        "  %g = s32[] call(%given), to_apply=%same\n  %p = s32[] add(%f, %g)",
    )
    text = "%same (x: s32[]) -> s32[] {\n  ROOT %x = s32[] parameter(0)\n}\n" + text
    (branch,) = {b for e in executions.walk(program.parse(text)) for b in e.branches}
    assert branch.depends_on == "data"


def test_operands_that_many_operations_share_are_looked_at_once():
    steps = [f"%p{n + 1} = s32[] add(%p{n}, %p{n})" for n in range(60)]  # 2 ** 60 paths
    decides = "\n  ".join(["%p0 = s32[] constant(1)", *steps, "%p = s32[] negate(%p60)"])
    text = CONDITIONAL.replace("%p = s32[] parameter(1)", decides)
    (branch,) = {b for e in executions.walk(program.parse(text)) for b in e.branches}
    assert branch.depends_on == "constant"


def test_operations_without_an_estimate_have_no_cycles_and_a_start_is_of_its_kind():
    text = CONDITIONAL.replace("tan(%x)", "all-gather-start(%x)")
    found = list(executions.walk(program.parse(text)))
    assert {e.cycles for e in found} == {0}
    assert {"all-gather", "add"} <= {executions.base_opcode(e.instruction) for e in found}
