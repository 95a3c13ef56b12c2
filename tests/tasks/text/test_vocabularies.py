import hashlib
import shutil

import pytest

from core.errors import UserError
from tasks import text
from tasks.text import seqio_tasks, vocabularies

SAMPLE = "def f(x):\n\treturn  x  # größer, 漢字 \U0001f600\r\n"


@pytest.mark.slow
def test_bytes_agree_with_seqio():
    ours, theirs = vocabularies.bytes(), seqio_tasks.library().ByteVocabulary()
    assert ours.encode(SAMPLE) == list(theirs.encode(SAMPLE))
    assert (ours.size, ours.eos_id, ours.pad_id) == (theirs.vocab_size, theirs.eos_id, theirs.pad_id)
    ids = [*ours.encode("ab"), 2, *ours.encode("c"), 1, *ours.encode("d")]
    assert ours.decode(ids) == theirs.decode(ids) == "abc"


@pytest.mark.covers("D09")
def test_ids_outside_are_refused_not_clipped():
    with pytest.raises(ValueError, match="id 259 is outside bytes"):
        vocabularies.bytes().decode([65, 259])
    with pytest.raises(ValueError, match="id -1"):
        vocabularies.bytes().decode([-1])


@pytest.mark.covers("D09")
def test_a_model_that_is_too_small_is_refused():
    vocabularies.check_fits(vocabularies.bytes(), vocab_size=259)
    with pytest.raises(ValueError, match="VOCAB_SIZE = 259"):
        vocabularies.check_fits(vocabularies.bytes(), vocab_size=256)


@pytest.mark.parametrize("size", [299, True, "512"])
def test_sizes_are_checked(size):
    with pytest.raises(ValueError, match="size is"):
        vocabularies.trained_sentencepiece(size)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A task over the standard library's vocabulary of 320 pieces, and its run directory."""
    run_dir = tmp_path_factory.mktemp("run")
    task = text.python_source(length=64, num_streams=2, vocabulary=vocabularies.trained_sentencepiece(320))
    task.vocabulary.prepare(
        str(run_dir), is_host_zero=True, sample=lambda: [SAMPLE, "for i in range(8):\n    pass\n" * 50]
    )
    return task.vocabulary, run_dir


def test_a_trained_vocabulary_gives_every_text_back(trained):
    vocabulary, _ = trained
    assert vocabulary.size == 320
    for sample in (SAMPLE, "  two  spaces ", "\n\n", "never seen: ξ"):
        ids = vocabulary.encode(sample)
        assert min(ids) > 2
        assert vocabulary.decode([*ids, 1, 5]) == sample


def test_training_is_deterministic_and_shared(trained, tmp_path):
    vocabulary, run_dir = trained
    sample = lambda: [SAMPLE, "for i in range(8):\n    pass\n" * 50]  # noqa: E731
    again = vocabularies.trained_sentencepiece(320)
    again.prepare(str(tmp_path), is_host_zero=True, sample=sample)
    assert again.hash == vocabulary.hash
    other_host = vocabularies.trained_sentencepiece(320)
    with pytest.raises(ValueError, match="not trained yet"):
        _ = other_host.hash
    other_host.prepare(str(run_dir), is_host_zero=False, sample=pytest.fail)
    assert other_host.hash == vocabulary.hash
    existing = vocabularies.sentencepiece(other_host.path)
    assert (existing.size, existing.hash) == (320, vocabulary.hash)
    assert vocabulary.hash[:12] in existing.describe()


def test_a_vocabulary_of_other_data_is_kept_only_for_a_run_with_a_checkpoint(trained, tmp_path):
    """An earlier start may have trained it, and then been refused."""
    vocabulary, run_dir = trained
    shutil.copytree(run_dir / "vocabulary", tmp_path / "vocabulary")
    other = {"is_host_zero": True, "sample": lambda: ["zebra quartz vexing " * 200 + SAMPLE]}
    again = vocabularies.trained_sentencepiece(320)
    again.prepare(str(tmp_path), **other)
    assert again.hash != vocabulary.hash
    for part in ("state/x", "meta/x", "_CHECKPOINT_METADATA/x"):
        (tmp_path / "checkpoints" / "3" / part).mkdir(parents=True)
    resumed = vocabularies.trained_sentencepiece(320)
    resumed.prepare(str(tmp_path), is_host_zero=True, sample=pytest.fail)
    assert resumed.hash == again.hash


def test_another_model_file_is_refused(trained, tmp_path):
    vocabulary, _ = trained
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    shutil.copy(vocabulary.path, folder / "sentencepiece_320.model")
    (folder / "sentencepiece_320.sha256").write_text(hashlib.sha256(b"other").hexdigest())
    with pytest.raises(ValueError, match=r"\.model \([\d,]+ bytes\) is not the model that was trained for this run"):
        vocabularies.trained_sentencepiece(320).prepare(str(tmp_path), is_host_zero=False, sample=list)


def test_host_zero_must_come_first(tmp_path):
    with pytest.raises(ValueError, match="host 0 trains it first"):
        vocabularies.trained_sentencepiece(320).prepare(str(tmp_path), is_host_zero=False, sample=list)


def test_too_little_text_is_reported(tmp_path):
    with pytest.raises(ValueError, match="could not train 5000 pieces"):
        vocabularies.trained_sentencepiece(5000).prepare(str(tmp_path), is_host_zero=True, sample=lambda: ["ab"])


def test_a_missing_model_is_a_problem_with_its_fix():
    assert "VOCABULARY is not set" in vocabularies.sentencepiece(None).problems()[0]
    assert "no SentencePiece model" in vocabularies.sentencepiece("/nowhere/x.model").problems()[0]
    assert "absent" in vocabularies.sentencepiece(None).describe()
    with pytest.raises(ValueError, match="no SentencePiece model"):
        _ = vocabularies.sentencepiece("/nowhere/x.model").size


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "words.model").write_text("not a model")
    with pytest.raises(ValueError, match=r"words\.model is not a SentencePiece model: set VOCABULARY"):
        _ = vocabularies.sentencepiece(str(tmp_path / "words.model")).size


def test_a_prompt_of_numbers_that_has_a_word_or_an_id_outside_is_an_error():
    numbers = vocabularies.Numbers(10)
    assert numbers.encode("3 0  9") == [3, 0, 9]
    assert numbers.eos_id not in range(10)  # none of them ends a continuation
    for prompt, said in (("3 four", "'four' is no id of"), ("-1", "'-1' is no id of"), ("10", "expected 0 to 9")):
        with pytest.raises(UserError, match=said):
            numbers.encode(prompt)
