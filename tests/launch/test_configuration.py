"""The mesh in environment variables: converted, printed, compared between hosts, and refused if malformed."""

import pytest

from launch import environment
from launch.check import preflight
from launch.config import ConfigError, loader

QUICKSTART = "gin/quickstart.gin"


def bindings(config, axes):
    return environment.mesh_bindings(environ={"TPU_MESH_CONFIG": config, "TPU_AXIS_NAMES": axes})


@pytest.fixture
def mesh(monkeypatch):
    def say(config, axes):
        monkeypatch.setenv("TPU_MESH_CONFIG", config)
        monkeypatch.setenv("TPU_AXIS_NAMES", axes)

    for name in ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES"):
        monkeypatch.delenv(name, raising=False)
    return say


@pytest.mark.covers("L10", "M02")
def test_degrees_become_gin_bindings():
    assert bindings("", "") == ()
    assert bindings("4,2,2", "data,fsdp,tensor") == (
        "STRATEGY = @strategies.mesh3d()",
        "strategies.mesh3d.data = 4",
        "strategies.mesh3d.fsdp = 2",
        "strategies.mesh3d.tensor = 2",
    )
    assert bindings("8, -1", "tensor, data")[1:] == (
        "strategies.mesh3d.data = -1",
        "strategies.mesh3d.fsdp = 1",  # an axis that is not named
        "strategies.mesh3d.tensor = 8",
    )


@pytest.mark.covers("L10", "M02")
@pytest.mark.parametrize(
    ("config", "axes", "says"),
    [
        ("4,2,2", "", "TPU_MESH_CONFIG is set and TPU_AXIS_NAMES is not: set both, such as TPU_MESH_CONFIG=4,2,2"),
        ("", "data", "TPU_AXIS_NAMES is set and TPU_MESH_CONFIG is not"),
        ("4,2", "data,fsdp,tensor", "2 degrees for 3 axes: expected one for each"),
        ("4,2,2", "data,fsdp,model", "axis 'model': call it tensor"),
        ("4,4", "data,expert", "axis 'expert': expected one of data, fsdp, tensor"),
        ("4,4", "data,data", "axis 'data' is named 2 times"),
        ("4,two", "data,fsdp", "degree 'two': expected a whole number from 1 up, or -1 for the remaining chips"),
        ("4,0", "data,fsdp", "degree '0'"),
        ("-1,-1", "data,fsdp", "more than one -1: only one axis can take the remaining chips"),
    ],
)
def test_values_that_make_no_mesh_are_named_errors(config, axes, says):
    with pytest.raises(ValueError, match="TPU_") as error:
        bindings(config, axes)
    assert says in str(error.value)


def test_all_problems_of_the_arguments_are_reported_at_once():
    with pytest.raises(ValueError, match="TPU_MESH_CONFIG=4,x TPU_AXIS_NAMES=data,fsdp,model") as error:
        bindings("4,x", "data,fsdp,model")
    assert all(what in str(error.value) for what in ("2 degrees for 3 axes", "call it tensor", "degree 'x'"))


def shape(config):
    return dict(config.build().strategy.mesh_shape)


@pytest.mark.covers("L10", "M02")
def test_they_win_over_the_file_and_flags_win_over_them(mesh):
    alone = loader.load(QUICKSTART)
    assert alone.build().strategy.name == "fsdp"
    mesh("2,2,2", "data,fsdp,tensor")
    config = loader.load(QUICKSTART)
    assert config.build().strategy.name == "mesh3d"
    assert shape(config) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert config.notes[0].startswith("TPU_MESH_CONFIG=2,2,2 TPU_AXIS_NAMES=data,fsdp,tensor bind STRATEGY = @")
    assert config.text != alone.text  # what hosts compare
    assert "strategies.mesh3d.tensor = 2" in config.text
    flagged = loader.load(QUICKSTART, bindings=["strategies.mesh3d.tensor = 1", "strategies.mesh3d.fsdp = 4"])
    assert shape(flagged) == {"data": 2, "fsdp": 4, "tensor": 1}
    chosen = loader.load(QUICKSTART, bindings=["STRATEGY = @strategies.data_parallel()"])
    assert chosen.build().strategy.name == "data_parallel"
    assert any("TPU_MESH_CONFIG" in note and "is left out" in note for note in chosen.notes[1:])


@pytest.mark.covers("M05", "R08")
@pytest.mark.parametrize(
    ("config", "axes", "finding", "says"),
    [
        ("4,4,2", "data,fsdp,tensor", "layout", "needs 32 devices, but v4-32 has 16"),
        ("4,2,2", "data,fsdp,model", "configuration", "axis 'model': call it tensor"),
    ],
)
def test_a_check_says_what_is_wrong_with_them(config, axes, finding, says, mesh, tmp_path):
    mesh(config, axes)
    checked = preflight.check(QUICKSTART, slice_name="v4-32", run_dir=str(tmp_path))
    assert not checked.ok
    assert says in next(f.detail for f in checked.findings if f.name == finding and not f.ok)


def test_a_seed_below_zero_is_refused():
    with pytest.raises(ValueError, match="seed = -3: expected an integer of at least 0"):
        loader.load(QUICKSTART, bindings=["SEED = -3"]).build()


def test_a_slice_that_the_argument_replaces_is_noted():
    notes = loader.load(QUICKSTART, bindings=["SLICE = 'v4-8'"], slice_name="v4-16").notes
    assert notes == ("--gin #1: SLICE = 'v4-8' is left out, the SLICE argument chose 'v4-16'",)
    assert loader.load(QUICKSTART, bindings=["SLICE = 'v4-16'"], slice_name="v4-16").notes == ()
    assert loader.load(QUICKSTART, bindings=["SLICE = 'v4-8'"]).notes == ()
    assert loader.load(QUICKSTART, slice_name="v4-16").notes == ()  # what a file names is there to be replaced


def test_a_file_in_a_bucket_is_read_and_its_mistakes_bear_its_address(monkeypatch, tmp_path):
    address, copy = "gs://bucket/first.gin", tmp_path / "first.gin"
    monkeypatch.setattr(loader.paths, "resolve", lambda path: {address: copy}[path])
    with pytest.raises(ValueError, match=r"there is no file 'gs://bucket/first\.gin'"):
        loader.load(address)
    copy.write_text("include 'gin/quickstart.gin'\nSEED = 5\n")
    config = loader.load(address)
    assert (config.experiment, config.build().seed) == (address, 5)
    copy.write_text("include 'gin/quickstart.gin'\nSED = 5\n")
    with pytest.raises(ValueError, match=r"gs://bucket/first\.gin:2: SED is not one of the macros"):
        loader.load(address)
    copy.write_bytes("include 'gin/quickstart.gin'\nPROMPT = 'Füße'\n".encode("latin-1"))
    says = r"(?s)gs://bucket/first\.gin: the file cannot be read.*can't decode byte 0xfc.*a gin file is UTF-8 text"
    with pytest.raises(ConfigError, match=says):
        loader.load(address)
