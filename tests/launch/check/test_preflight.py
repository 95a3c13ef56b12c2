"""The preflight of data and run directory for each location of the hosts; it writes nothing."""

import json
import pathlib
import re
import subprocess

import jax
import pytest

from core import slices
from core.errors import UserError
from core.files import paths
from launch import __main__ as cli
from launch.check import preflight
from launch.config import loader
from launch.hosts import workstation
from launch.runs import smoke
from parallel import mesh
from parallel.compiled import host_memory
from parallel.planning import arithmetic

QUICKSTART, VALKYRIE = "gin/quickstart.gin", "gin/valkyrie_7b.gin"


def check(path=QUICKSTART, *, run_dir, **options):
    return {f.name: f for f in preflight.check(path, run_dir=str(run_dir), **options).findings}


def data(path=QUICKSTART, *, hosts="here", **options):
    """The findings of the data alone, which need no layout."""
    return preflight.data(loader.load(path, **options).build(), smoked=False, hosts=hosts)


def data_of(**named):
    bindings = [f"{name} = {value!r}" for name, value in named.items()]
    return data(VALKYRIE, bindings=bindings, slice_name="v4-32", hosts="dry run")


def bound(path, slice_name, *bindings):
    """An experiment and its program; raises UserError if the layout does not fit."""
    experiment = loader.load(path, bindings=bindings, slice_name=slice_name).build()
    return experiment, experiment.bind(mesh.topology_devices(slices.get(slice_name)))


def test_a_check_makes_no_folder(tmp_path):
    assert check(run_dir=tmp_path / "a/b/c", hosts="simulated")["run directory"].ok
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    (found,) = preflight.run_directory(f"{tmp_path}/file/run", slices.get("v4-16"), "here")
    assert not found.ok
    assert f"cannot write to {tmp_path}/file/run: NotADirectoryError" in found.detail


@pytest.mark.parametrize(("vocab_size", "is_noted"), [(259, False), (515, False), (516, True)])
def test_a_model_with_many_more_rows_than_ids_is_noted(vocab_size, is_noted):
    found = {f.name: f for f in data(bindings=[f"VOCAB_SIZE = {vocab_size}"])}
    assert ("vocabulary" in found) == is_noted
    if is_noted:
        assert found["vocabulary"].is_note
        assert "vocab_size 516, but bytes (259 ids) has 259 ids: 257 rows are never" in found["vocabulary"].detail


@pytest.mark.covers("L06")
def test_a_local_disk_is_a_note_if_the_hosts_are_unknown(tmp_path, capsys):
    own = [QUICKSTART, "--run-dir", str(tmp_path / "run")]
    assert cli.main(["check", "v4-16", *own]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == 1
    assert "all 2 hosts of v4-16 must see one run directory" in notes[0]
    assert "--run-dir gs://BUCKET/" in notes[0]
    for options in (["v4-16", *own, "--simulate"], ["v4-8", *own]):
        assert cli.main(["check", *options]) == 0
        assert "\nnote" not in capsys.readouterr().out
    assert cli.main(["check", "v4-16", *own, "--ship"]) == 2
    assert "FAIL  run directory" in capsys.readouterr().out


@pytest.mark.usefixtures("closed_port")
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bucket_that_only_the_hosts_may_write_is_a_note(monkeypatch):
    def fail_with(error):
        def check_writable(directory):
            raise UserError(f"cannot write to {directory}") from error

        monkeypatch.setattr(paths, "check_writable", check_writable)

    def alone(hosts):
        (found,) = preflight.run_directory("gs://bucket/x", slices.get("v4-16"), hosts)
        return found

    fail_with(PermissionError("no credentials"))
    found = check(run_dir="gs://bucket/x", slice_name="v4-16", hosts="shipped to")["run directory"]
    assert (found.ok, found.detail, found.is_note) == (True, "cannot write to gs://bucket/x", True)
    fail_with(FileNotFoundError("no such bucket"))
    assert not alone("shipped to").ok
    asked = []
    monkeypatch.setattr(paths, "check_writable", asked.append)
    assert alone("dry run").is_note
    assert not asked


def test_data_that_was_not_looked_at_is_named():
    there = {"DATA": "gs://bucket/*.txt", "VOCABULARY": "/data/words.model"}
    facts, note = data_of(**there)
    assert facts.ok
    assert not facts.is_note
    assert (note.is_note, note.detail) == (True, "not checked: gs://bucket/*.txt, /data/words.model")
    (missing,) = (f for f in data_of(VOCABULARY="/data/words.model") if not f.ok)
    assert "DATA is not set" in missing.detail
    (local,) = (f for f in data_of(DATA="no_such_folder/*.txt", VOCABULARY="/m.model") if not f.ok)
    assert "no file matches 'no_such_folder/*.txt'" in local.detail


def test_a_bucket_of_data_is_noted_where_the_vocabulary_was_read(tmp_path):
    bindings = ["TASK = @text.files()", "text.files.train = 'gs://bucket/*.txt'"]
    bindings += ["text.files.length = %LENGTH", "text.files.num_streams = %NUM_STREAMS"]
    found = preflight.check(QUICKSTART, bindings=bindings, run_dir=str(tmp_path), hosts="simulated")
    assert [f.detail for f in found.findings if f.is_note] == ["not checked: gs://bucket/*.txt"]


def test_a_chat_template_is_tried_on_a_conversation(tmp_path):
    """The folder's template knows no role "tool"."""
    folder = pathlib.Path("tests/tasks/text/fixtures/tokenizers/bpe").resolve()
    for role in ("user", "tool"):
        messages = [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]
        for name in (role, f"held_out_{role}"):
            (tmp_path / f"{name}.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 2)
        bindings = ["include 'gin/tasks/chats.gin'", f"VOCABULARY = '{folder}'", "NUM_STREAMS = 2", "VOCAB_SIZE = 400"]
        bindings += [f"DATA = '{tmp_path}/{role}.jsonl'", f"VALIDATION_DATA = '{tmp_path}/held_out_{role}.jsonl'"]
        found = {f.name: f for f in data(bindings=bindings, hosts="simulated")}["data"]
        assert found.ok == (role == "user")
        assert ("answers end with <|im_end|>" if found.ok else "tool.jsonl:1: ") in found.detail


def test_a_vocabulary_that_cannot_be_read_is_no_traceback(tmp_path, monkeypatch):
    from tasks.text import sentencepieces

    def unreachable(self):
        raise OSError("no route to the bucket")

    monkeypatch.setattr(sentencepieces.SentencePiece, "_model", property(unreachable))
    bindings = ["DATA = 'gs://bucket/*.txt'", "VOCABULARY = 'gs://bucket/m.model'"]
    for where, ok in (("simulated", False), ("shipped to", True)):
        found = preflight.check(VALKYRIE, bindings=bindings, slice_name="v4-32", run_dir=str(tmp_path), hosts=where)
        (unread,) = (f for f in found.findings if "cannot read gs://bucket/m.model" in f.detail)
        assert (unread.ok, unread.is_note) == (ok, ok)


def test_a_vocabulary_on_a_disk_that_cannot_be_read_is_no_traceback(tmp_path, monkeypatch):
    from tasks.text import sentencepieces

    def refused(self):
        raise PermissionError(13, "Permission denied", self.path)

    monkeypatch.setattr(sentencepieces.SentencePiece, "_model", property(refused))
    for name in ("a.txt", "b.txt", "m.model"):
        (tmp_path / name).write_text("words\n")
    bindings = [f"DATA = '{tmp_path}/*.txt'", f"VOCABULARY = '{tmp_path}/m.model'"]
    for where in ("here", "simulated"):
        (unread,) = data(VALKYRIE, bindings=bindings, slice_name="v4-32", hosts=where)
        assert (unread.ok, unread.is_note) == (False, False)
        assert f"cannot read {tmp_path}/m.model from here: PermissionError: " in unread.detail


def test_files_that_git_ignores_are_not_shipped(tmp_path):
    (tmp_path / ".gitignore").write_text("ignored/\n")
    for folder in ("ignored", "kept"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("x")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert workstation.left_behind(["kept/*.txt", "kept", "./kept/a.txt", "absent/*"], workspace=tmp_path) == []
    (problem,) = workstation.left_behind(["kept/*.txt", "*/*.txt"], workspace=tmp_path)
    assert "'*/*.txt' would not be copied to the hosts: git ignores ignored/a.txt" in problem
    assert "gs://BUCKET/" in problem


def test_included_files_and_modules_that_the_hosts_would_not_have_are_found(tmp_path, monkeypatch):
    (tmp_path / "more.gin").write_text("TOTAL_STEPS = 50\n")
    (tmp_path / "mine_alone.py").write_text("def value():\n    return 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = [f"include '{tmp_path}/more.gin'", "import mine_alone", "WARMUP_STEPS = @mine_alone.value()"]
    for hosts, wanted in (("dry run", ["mine_alone.py", "more.gin"]), ("simulated", [])):
        options = {"slice_name": "v4-8", "run_dir": str(tmp_path / "run"), "hosts": hosts}
        found = preflight.check("gin/quickstart.gin", bindings=own, **options).findings
        said = [line for one in found if one.name == "files" and not one.ok for line in str(one.detail).splitlines()]
        assert sorted(line.partition(" would not be copied to the hosts: put it into ")[0] for line in said) == [
            f"{tmp_path}/{name}" for name in wanted
        ]


@pytest.mark.covers("D01")
def test_batch_sizes_that_are_advised_suit_streams_and_chips(tmp_path):
    def layout(*bindings):
        return check(run_dir=tmp_path, bindings=bindings, slice_name="v4-16")["layout"]

    refused = layout("BATCH_SIZE = 30")
    assert "must divide over NUM_STREAMS = 8 and over 8 groups of chips" in refused.detail
    assert refused.detail.endswith("Set BATCH_SIZE = 24 or 32")
    refused = layout("BATCH_SIZE = 40", "NUM_STREAMS = 5", "ACCUM_STEPS = 2")
    assert refused.detail.endswith("Set BATCH_SIZE = 80")
    bound(QUICKSTART, "v4-16", "BATCH_SIZE = 80", "NUM_STREAMS = 5", "ACCUM_STEPS = 2")  # raises nothing
    bound(QUICKSTART, "v4-16", "BATCH_SIZE = 24")


def test_every_binding_that_is_left_out_has_a_line_of_its_own(capsys, tmp_path):
    bindings = ["TASK = @synthetic.random_tokens()", "synthetic.random_tokens.vocab_size = 259"]
    bindings += ["synthetic.random_tokens.length = %LENGTH", "synthetic.random_tokens.num_streams = 8"]
    argv = [x for b in bindings for x in ("--gin", b)]
    assert cli.main(["check", "v4-8", QUICKSTART, "--run-dir", str(tmp_path), *argv]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"ok    configuration  {QUICKSTART}"
    left_out = [line for line in lines if "is left out" in line]
    assert len(left_out) == 4
    assert all(line.startswith(" " * 21 + "gin/") and line.count("is left out") == 1 for line in left_out)


@pytest.mark.covers("O05")
def test_a_project_of_weights_and_biases_without_the_package_is_refused(tmp_path):
    binding = "settings.Logging.wandb_project = 'renga'"
    found = preflight.check("gin/quickstart.gin", bindings=[binding], run_dir=str(tmp_path), hosts="simulated")
    (wrong,) = [finding for finding in found.findings if not finding.ok]
    assert wrong.detail.endswith("needs the package wandb; launch/setup.sh --extra wandb")


def test_a_batch_that_no_host_can_hold_is_refused_by_its_name(tmp_path):
    huge, large = bound(QUICKSTART, "v4-16", "BATCH_SIZE = 1000000000"), ["BATCH_SIZE = 262144"]
    for where, whose in (("here", "a host of v4-16 has 379.0 GiB"), ("simulated", "this machine has ")):
        _, found = preflight._memories(*huge, where, with_activations=where == "here")
        assert not found.ok
        assert found.detail.startswith("BATCH_SIZE = 1,000,000,000 rows of 2,560 bytes: needs ")
        assert whose in found.detail
        assert "Fix: set BATCH_SIZE to at most " in found.detail
    found = check(run_dir=tmp_path, bindings=large)
    assert found["host memory"].ok
    assert not found["memory"].ok  # of a chip
    assert "GiB with activations and gradients, of 30.75 GiB per chip" in found["memory"].detail
    assert "BATCH_SIZE = 262,144: lower it, raise ACCUM_STEPS" in found["memory"].detail


def test_activations_that_are_saved_on_the_host_count_as_its_memory(monkeypatch):
    """Valkyrie-7B saves 64 MiB per layer and row. A chip has 8 of the 1,024 rows at a time, without accumulation 64."""
    moved = ["from models.decoder import transformer", "transformer.Transformer.remat = 'attention_on_host'"]
    rows = ["BATCH_SIZE = 1024", "ACCUM_STEPS = 8"]

    def host_memory_of(program):
        return preflight._memories(*program, "shipped to", with_activations=True)[1]

    kept, saved = (host_memory_of(bound(VALKYRIE, "v4-32", *more, *rows)) for more in ((), moved))
    assert kept.ok
    assert saved.ok
    without, with_saved = (float(found.detail.split(" GiB at least of 379 ")[0]) for found in (kept, saved))
    per_row = 32 * 64 / 1024  # GiB, in 32 layers
    assert with_saved - without == pytest.approx(8 * per_row * 4, rel=0.01)  # of 4 chips

    whole = bound(VALKYRIE, "v4-32", *moved, rows[0])
    refused = host_memory_of(whole)
    assert not refused.ok
    assert "bytes and the activations that are saved on the host: needs" in refused.detail
    (counted,) = re.findall(r"saved activations ([\d.]+) GiB", refused.detail)
    assert float(counted) == pytest.approx(64 * per_row * 4, rel=0.01)
    assert ", raise ACCUM_STEPS, or let the model save less on the host (remat)" in refused.detail

    monkeypatch.setattr(arithmetic, "place", lambda program: 1 / 0)
    unknown = host_memory_of(whole)
    assert unknown.ok
    assert unknown.detail.endswith("of a host of v4-32; activations saved on the host not counted")


def test_arrays_that_a_checkpoint_of_another_model_leaves_out_do_not_stop_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_initial_parameters", lambda *_: (None, ["params/another_model/w"]))
    assert check(run_dir=tmp_path, hosts="simulated")["disk"].ok


def test_runs_in_folders_of_their_own_do_not_look_at_the_checkpoint(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(preflight, "_initial_parameters", lambda *given: (looked.append(given[2]), (None, ()))[1])
    monkeypatch.setattr(preflight, "_checkpoint", lambda *_: pytest.fail("the checkpoint is of another run"))
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert check(run_dir=tmp_path, hosts="simulated", smoked=True)["layout"].ok
    assert check(run_dir=tmp_path, hosts="simulated", tuned=True)["layout"].ok
    assert looked == [f"{tmp_path}/tune"]


def test_a_host_refuses_a_batch_that_it_cannot_hold(monkeypatch):
    experiment = loader.load(QUICKSTART).build()
    program = experiment.bind(mesh.topology_devices(slices.get(experiment.slice)))
    need = host_memory.per_host(program, experiment.task, eval_batches=8, saved_bytes=0)
    assert need["batches"] == 2 * 8 * 128 * 5 * 4  # two copies of 8 rows of 5 fields
    assert need["evaluation"] == 8 * 8 * 128 * 5 * 4
    monkeypatch.setattr(host_memory, "available_bytes", lambda: sum(need.values()))
    host_memory.require(program, experiment.task, eval_batches=8)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: sum(need.values()) - 1)
    with pytest.raises(ValueError, match=r"BATCH_SIZE = 16 rows .*, and this host has .* at most 8, or EVAL_BATCHES"):
        host_memory.require(program, experiment.task, eval_batches=8)
    fixed = sum(need.get(name, 0) for name in ("a checkpoint", "state and gradients"))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: fixed + 1)  # for no row at all
    with pytest.raises(ValueError, match=r"Fix: set EVAL_BATCHES \(now 8\) lower$"):
        host_memory.require(program, experiment.task, eval_batches=8)


def test_a_simulation_that_does_not_fit_is_refused_with_both_numbers(monkeypatch):
    gib = 2**30
    assert 2**20 < host_memory.available_bytes() < 2**50
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 24 * gib)
    host_memory.require_simulated(12 * gib, slice_name="v4-32")
    with pytest.raises(ValueError, match=r"v4-32 needs 100 GiB .* has 24 GiB of free memory\. Give a smaller slice"):
        host_memory.require_simulated(int(100.4 * gib), slice_name="v4-32")


COUPLED = """
import dataclasses
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from core import stack
from core.batches import Field
from core.types import LossOutput
from models.haiku_model import HaikuModel
from tasks.sampled import SampledTask


@dataclasses.dataclass(frozen=True)
class Pairs(SampledTask):
    num_streams: int = 4

    def spec(self, batch_size):
        return {name: Field((batch_size, 6), np.float32, ("batch", None)) for name in ("left", "right")}

    def row(self, rng, *, is_training):
        left = rng.normal(size=6).astype(np.float32)
        return {"left": left, "right": left + 0.1}


@dataclasses.dataclass(frozen=True)
class Contrastive(HaikuModel):
    names = {"*w": (None, "embed"), "*b": ("embed",)}
    together: bool = True

    def sums(self, batch, *, is_training):
        tower = hk.Linear(8)
        left, right = (tower(batch[name]) for name in ("left", "right"))
        scores = left @ right.T if self.together else -jnp.abs(left - right)
        each = jnp.diagonal(jax.nn.log_softmax(scores)) if self.together else jnp.sum(scores, axis=1)
        return LossOutput(-jnp.sum(each), jnp.float32(len(each)), {})


class Declared(Contrastive):
    couples_rows = True
"""


def test_a_loss_that_couples_rows_is_found_where_steps_divide_them(tmp_path, monkeypatch):
    (tmp_path / "coupled.py").write_text(COUPLED)
    monkeypatch.syspath_prepend(tmp_path)
    head = "from __gin__ import dynamic_registration\nfrom parallel import strategies\nimport coupled\n"
    head += "include 'gin/defaults.gin'\nTASK = @coupled.Pairs()\nPROMPT = ''\nBATCH_SIZE = 16\nNUM_STREAMS = 4\n"
    (tmp_path / "coupled.gin").write_text(head + "MODEL = @coupled.Contrastive()\nSLICE = 'v4-8'\n")
    for bindings, name in (
        (["ACCUM_STEPS = 2"], "microbatches"),
        (["ACCUM_STEPS = 2", "MODEL = @coupled.Declared()"], "layout"),
        (["ACCUM_STEPS = 2", "coupled.Contrastive.together = False"], ""),
        (["MODEL = @coupled.Declared()"], ""),
        ([], ""),
    ):
        found = check(str(tmp_path / "coupled.gin"), run_dir=tmp_path / "run", bindings=bindings)
        assert [f for f in found if not found[f].ok] == [name] * bool(name), found

    unprepared = "class Unprepared(Pairs):\n    def row(self, rng, *, is_training):\n        return self.loaded[0]\n"
    (tmp_path / "unprepared.py").write_text("from coupled import Pairs\n" + unprepared)
    given = ["ACCUM_STEPS = 2", "import unprepared", "TASK = @unprepared.Unprepared()"]
    found = check(str(tmp_path / "coupled.gin"), run_dir=tmp_path / "run", bindings=given)
    assert found["microbatches"].is_note
    assert "AttributeError" in found["microbatches"].detail
    assert all(one.ok for one in found.values()), found

    def without_cpus(backend):
        raise RuntimeError(f"Unknown backend {backend}")  # as jax does under JAX_PLATFORMS=tpu

    experiment = loader.load(str(tmp_path / "coupled.gin"), bindings=["ACCUM_STEPS = 2"]).build()
    monkeypatch.setattr(jax, "local_devices", without_cpus)
    assert smoke.require_divisible_rows(experiment) == ""
