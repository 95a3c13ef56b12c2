"""Small datasets of known content."""

import numpy as np
import pytest

from tasks.puzzles import files, writing


@pytest.fixture
def make_split():
    """A split of groups of puzzles of examples: `make_split([[1, 1, 1], [2]])` has a group of three and one of one."""

    def make(groups, seq_len=3):
        sizes = [size for group in groups for size in group]
        examples = sum(sizes)
        metadata = files.Metadata(
            vocab_size=200,
            seq_len=seq_len,
            num_puzzle_identifiers=len(sizes) + 1,
            total_groups=len(groups),
            mean_puzzle_examples=examples / len(sizes),
            total_puzzles=len(sizes),
        )
        tokens = np.arange(examples)[:, None] % 200 + np.zeros((1, seq_len), int)
        return files.Split(
            tokens,
            tokens,
            1 + np.arange(len(sizes)),
            np.concatenate([[0], np.cumsum(sizes)]),
            np.concatenate([[0], np.cumsum([len(group) for group in groups])]),
            metadata,
        )

    return make


@pytest.fixture
def write_dataset(tmp_path):
    """A dataset of `train` and `test` examples of 5 tokens below 9, one a group, example e all of token e % 8 + 1."""

    def write(name="set", train=20, test=7, **about):
        directory = str(tmp_path / name)
        with writing.dataset(directory, vocab_size=9, seq_len=5, about=about) as out:
            for split, count in ((out.train, train), (out.test, test)):
                for number in range(count):
                    tokens = np.full((1, 5), number % 8 + 1)
                    labels = tokens.copy()
                    labels[0, 0] = 0  # ignored
                    split.add_group(tokens, labels, identifiers=[number % 3])
            out.identifiers += ["a", "b"]
        return directory

    return write
