import gzip

import jax
import jax.numpy as jnp
import pytest

from core.training import profiling

PLANES = "tensorboard/plugins/profile"


def profile_one(profile, step):
    assert profile.start(step) is profile
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
        jax.jit(lambda x: x @ x)(jnp.ones((32, 32))).block_until_ready()
    return profile.stop()


@pytest.mark.covers("O01")
def test_a_window_is_one_readable_file_where_tensorboard_looks(tmp_path):
    profile = profiling.Profile(str(tmp_path))
    assert not profile.is_open
    (file,) = profile_one(profile, 100)
    assert str(file.parent) == str(tmp_path / PLANES / "step_100")
    assert file.name.endswith("-p0.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    names = {event.name for plane in data.planes for line in plane.lines for event in line.events}
    assert any("train" in name for name in names)
    (second,) = profile_one(profile, 200)
    assert second.parent.name == "step_200"


@pytest.mark.covers("O01")
def test_hosts_that_share_a_hostname_do_not_overwrite_each_other(tmp_path):
    written = [profile_one(profiling.Profile(str(tmp_path), process_index=index), 7)[0] for index in (0, 1)]
    assert [file.name.rsplit("-", 1)[1] for file in written] == ["p0.xplane.pb", "p1.xplane.pb"]
    assert len(list((tmp_path / PLANES / "step_7").iterdir())) == 2


def test_windows_do_not_overlap(tmp_path):
    profile = profiling.Profile(str(tmp_path))
    with pytest.raises(RuntimeError, match="no profile window is open"):
        profile.stop()
    profile.start(3)
    try:
        with pytest.raises(RuntimeError, match="from step 4: the window step_3 is still open"):
            profile.start(4)
    finally:
        profile.stop()


TWO_HOSTS_PROFILE = """
import jax, jax.numpy as jnp
from core import distributed
from core.training import profiling
distributed.initialize(coordinator=COORDINATOR, process_index=PROCESS, process_count=HOSTS, local_cpu_devices=1)
profile = profiling.Profile("run")
profile.start(10)
jnp.ones(8).sum().block_until_ready()
profile.stop()
distributed.shutdown()
"""


@pytest.mark.covers("O01")
@pytest.mark.simulated(2)
def test_every_host_writes_into_one_session(run_hosts, tmp_path):
    results = run_hosts(TWO_HOSTS_PROFILE, hosts=2)
    assert [result.returncode for result in results] == [0, 0], results
    files = list((tmp_path / "run" / PLANES / "step_10").iterdir())
    assert sorted(file.name.rsplit("-", 1)[1] for file in files) == ["p0.xplane.pb", "p1.xplane.pb"]


@pytest.mark.covers("O02")
def test_memory_that_is_exhausted_leaves_a_profile_of_it(tmp_path, capsys):
    memory = profiling.MemoryProfiles(str(tmp_path), process_index=2)
    kept = jnp.ones((256, 1024))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"), memory.when_exhausted():
        jnp.zeros((2**46,), jnp.float32).block_until_ready()
    written = tmp_path / "memory" / "exhausted-host_2.pprof"
    assert gzip.decompress(written.read_bytes())  # what pprof reads: a gzipped protocol buffer
    said = capsys.readouterr().out
    assert said == f"host 2: memory is exhausted: what is in device memory is in {written}\n"
    assert kept.nbytes == 2**20


def test_other_errors_leave_none(tmp_path):
    with pytest.raises(ValueError, match="other"), profiling.MemoryProfiles(str(tmp_path)).when_exhausted():
        raise ValueError("other")
    assert not list(tmp_path.iterdir())
