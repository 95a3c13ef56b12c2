"""Reading traces: TPU planes, written here as the profiler documents them, and sessions of a run."""

import jax
import pytest

from core.training import profile_reader
from launch import __main__ as cli

MILLISECOND = 10**9  # picoseconds


def trace(*, began_seconds=1000, late_milliseconds=0, chips=2):
    """Three steps of 100 ms on each chip, of which 20 ms are an all-gather and 60 ms a fusion inside of a loop."""
    planes = []
    for chip in range(chips):
        steps, operations = [], []
        for number in range(3):
            at = 100 * number + late_milliseconds
            steps.append((str(7 + number), at, 95))
            operations += [("%while.3 = (f32[]) while(%x)", at, 65), ("%fusion.12 = bf16[8] fusion(%y)", at + 1, 60)]
            operations += [("%all-gather-done.4 = bf16[8] all-gather-done(%z)", at + 65, 20)]
        planes.append((f"/device:TPU:{chip}", {"Steps": steps, "XLA Ops": operations}))
    loop = [(text, 100 * n + late_milliseconds, ms) for n in range(3) for text, ms in [("wait for the batch", 25)]]
    planes.append(("/host:CPU", {"python": [*loop, ("hooks", 110 + late_milliseconds, 2)]}))
    began = (
        f'planes {{ name: "Task Environment" stats {{ metadata_id: 1 uint64_value: {began_seconds * 10**9} }} '
        'stat_metadata { key: 1 value { id: 1 name: "profile_start_time" } } }'
    )
    return "\n".join([*(plane(*p) for p in planes), began])


def plane(name, lines):
    names = sorted({text for events in lines.values() for text, _, _ in events})
    said = [f'planes {{ name: "{name}"']
    for number, (line, events) in enumerate(lines.items()):
        said.append(f'lines {{ id: {number} name: "{line}"')
        for text, at, long in events:
            said.append(
                f"events {{ metadata_id: {names.index(text) + 1} offset_ps: {at * MILLISECOND} "
                f"duration_ps: {long * MILLISECOND} }}"
            )
        said.append("}")
    for number, text in enumerate(names, 1):
        said.append(f'event_metadata {{ key: {number} value {{ id: {number} name: "{text}" }} }}')
    return " ".join([*said, "}"])


def gpu_plane(*, streams=2):
    """Each stream has two kernels of one fusion, 3 ms each, and a copy of memory that belongs to no operation."""
    said = ['planes { name: "/device:GPU:0"']
    for stream in range(streams):
        said.append(f'lines {{ id: {stream} name: "Stream #{stream}(Compute)"')
        for at in (10, 20):
            span = f"offset_ps: {at * MILLISECOND} duration_ps: {3 * MILLISECOND}"
            said.append(f'events {{ metadata_id: 1 {span} stats {{ metadata_id: 1 str_value: "fusion.{stream}" }} }}')
        said.append(f"events {{ metadata_id: 2 offset_ps: 0 duration_ps: {MILLISECOND} }} }}")
    said += ['event_metadata { key: 1 value { id: 1 name: "sm90_kernel" } }']
    said += ['event_metadata { key: 2 value { id: 2 name: "MemcpyD2H" } }']
    return " ".join([*said, 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }'])


def write(run_dir, name, text, *, session="step_7"):
    file = run_dir.joinpath(*profile_reader.PROFILES, session, f"{name}.xplane.pb")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))


def test_steps_and_operations_are_read_from_planes_of_chips(tmp_path):
    write(tmp_path, "t1v-w-0-p0", trace())
    session, (host,) = profile_reader.read_session(str(tmp_path))
    assert (session, host.process, host.chips, host.from_chips) == ("step_7", 0, 2, True)
    assert host.starts == {7: pytest.approx(1000.0), 8: pytest.approx(1000.1), 9: pytest.approx(1000.2)}
    assert host.step_seconds == pytest.approx(0.1)
    assert host.input_wait_seconds == pytest.approx(0.025)
    assert host.hooks_seconds == pytest.approx(0.001)  # 2 ms in two steps
    fusion, gather = host.operations  # the loop around the fusion is not counted again
    assert (fusion.name, fusion.seconds, fusion.count) == ("fusion", pytest.approx(0.36), 6)
    assert (gather.name, gather.is_collective) == ("all-gather-done", True)
    assert host.collectives_share == pytest.approx(20 / 80)


def test_a_step_that_began_before_the_session_is_left_out(tmp_path):
    write(tmp_path, "t1v-w-0-p0", trace(), session="step_8")
    _, (host,) = profile_reader.read_session(str(tmp_path))
    assert list(host.starts) == [8, 9]
    assert host.step_seconds == pytest.approx(0.1)


def test_a_single_step_has_its_own_time(tmp_path):
    write(tmp_path, "t1v-w-0-p0", trace(), session="step_9")
    _, (host,) = profile_reader.read_session(str(tmp_path))
    assert list(host.starts) == [9]
    assert host.step_seconds == pytest.approx(0.095)
    assert host.input_wait_seconds == pytest.approx(0.025)


@pytest.mark.covers("O04")
def test_skew_is_the_time_between_the_first_and_the_last_host(tmp_path, capsys):
    for process, late in ((0, 0), (1, 4), (3, 30)):
        write(tmp_path, f"t1v-p9-w-{process}-p{process}of6", trace(late_milliseconds=late))
    _, hosts = profile_reader.read_session(str(tmp_path))
    seconds, last = profile_reader.skew_seconds(hosts)
    assert (seconds, last.process) == (pytest.approx(0.03), 3)
    assert cli.main(["profile", str(tmp_path), "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert "step_7: steps 7 to 9 on 3 hosts" in said
    assert "skew: the last host starts a step 30 ms after the first, mostly t1v-p9-w-3-p3of6" in said
    assert "no profile from hosts 2, 4, 5" in said
    assert "0.025 s (25%)" in said
    assert "fusion" in said
    assert "all-gather" not in said  # --top 1
    assert "CPU devices" not in said


def host(name, *, starts=(), operations=()):
    of_steps = dict(enumerate(starts))
    return profile_reader.HostProfile(name, 0, 1, 1, True, of_steps, 0.0, 0.0, tuple(operations), 1.0)


def test_the_latest_host_is_the_latest_on_average():
    hosts = [host("z", starts=(1.0, 2.0, 3.3)), host("b", starts=(1.5, 2.4, 3.0)), host("a", starts=(1.2, 2.2, 3.2))]
    seconds, last = profile_reader.skew_seconds(hosts)
    assert (seconds, last.name) == (pytest.approx((0.5 + 0.4 + 0.3) / 3), "b")


def test_operations_of_hosts_are_added_and_the_longest_comes_first():
    def operation(name, seconds, count):
        return profile_reader.Operation(name, seconds, count, name == "all-gather")

    hosts = [
        host("a", operations=[operation("fusion", 0.2, 3), operation("all-gather", 0.1, 5)]),
        host("b", operations=[operation("all-gather", 0.4, 7), operation("copy", 0.3, 2)]),
    ]
    assert profile_reader.merged_operations(hosts) == [
        operation("all-gather", 0.5, 12),
        operation("copy", 0.3, 2),
        operation("fusion", 0.2, 3),
    ]


@pytest.mark.parametrize(
    ("name", "is_collective"),
    [
        ("all-reduce", True),
        ("all-to-all", True),
        ("all-reduce-scatter", True),
        ("reduce-scatter-start", True),
        ("collective-permute-done", True),
        ("send-done", True),
        ("reduce", False),
        ("fusion", False),
        ("sender", False),
        ("copy-start", False),
    ],
)
def test_opcodes_of_collectives(name, is_collective):
    (row,) = profile_reader._summed([(f"%{name}.1 = f32[2] x(%y)", 1.0, "0")])
    assert (row.name, row.is_collective) == (name, is_collective)


def test_the_last_session_is_read_unless_one_is_named(tmp_path):
    for step in (7, 20, 100):
        write(tmp_path, "h-p0", trace(), session=f"step_{step}")
    assert profile_reader.sessions(str(tmp_path)) == ["step_7", "step_20", "step_100"]
    assert profile_reader.read_session(str(tmp_path))[0] == "step_100"
    assert profile_reader.read_session(str(tmp_path), "step_7")[0] == "step_7"
    with pytest.raises(ValueError, match="no profile 'step_8'; existing profiles: step_7, step_20, step_100"):
        profile_reader.read_session(str(tmp_path), "step_8")


def test_the_error_without_a_profile_tells_how_to_make_one(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no profile: while the run is training, launch/pod.sh profile .* --seconds 5 makes one"
    ):
        profile_reader.read_session(str(tmp_path))


def test_kernels_of_a_gpu_are_summed_by_operation(tmp_path):
    """As the profiler documents them; no GPU has written one yet."""
    write(tmp_path, "a-p0", "\n".join([gpu_plane(), trace(chips=0)]))
    _, (host,) = profile_reader.read_session(str(tmp_path))
    assert (host.chips, host.from_chips) == (1, True)
    (fusion,) = host.operations
    assert (fusion.name, fusion.count, fusion.seconds) == ("fusion", 4, pytest.approx(0.012))
