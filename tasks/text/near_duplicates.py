"""Finds documents that nearly repeat an earlier one, by MinHash signatures (Broder 1997), computed by datasketch.

A document is represented by the set of its runs of 5 successive words. The share of equal entries in two signatures
estimates the Jaccard similarity of the sets. Only documents whose signatures are equal in a whole band of entries are
compared (locality-sensitive hashing).
"""

import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from core.errors import UserError
from tasks import permutation

LEAST_SIMILARITY, MOST_SIMILARITY = 0.5, 0.95
WORDS, HASHES = 5, 128  # words per run; entries per signature
_MISSED = (0.1, 0.9)  # weights of needless comparisons and of missed pairs in the choice of bands
_RUNS = 4096  # runs that are hashed at a time: 2 MiB
_WORD = re.compile(r"\w+")


def signatures(texts: Sequence[str]) -> np.ndarray:
    """Returns the MinHash signature of each of N texts, uint32 [N, HASHES]."""
    from datasketch import MinHash

    empty = MinHash(HASHES, seed=1, scheme="affine32", hashfunc=zlib.crc32)
    found = np.empty((len(texts), HASHES), np.uint32)
    for place, text in enumerate(texts):
        sketch = empty.copy()
        for some in _runs(text):
            sketch.update_batch(some)
        found[place] = sketch.hashvalues
    return found


def _runs(text: str) -> Iterator[list[bytes]]:
    words = [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(text.lower())] or [text.strip().encode()]
    count = max(len(words) - WORDS + 1, 1)
    for start in range(0, count, _RUNS):
        yield [b" ".join(words[at : at + WORDS]) for at in range(start, min(start + _RUNS, count))]


def settings(similarity: float) -> dict[str, float]:
    """Returns the settings that decide which documents are near duplicates, as JSON values."""
    return {"similarity": similarity, "words": WORDS, "hashes": HASHES}


class Seen:
    """The signatures of the documents kept so far, indexed by bands.

    Attributes:
      bands, rows: the number of bands, and of entries per band.
    """

    def __init__(self, similarity: float) -> None:
        """Chooses the bands for a similarity. Raises UserError if it is not from 0.5 to 0.95."""
        if not LEAST_SIMILARITY <= similarity <= MOST_SIMILARITY:
            raise UserError(
                f"near duplicates with a similarity of {similarity}: expected {LEAST_SIMILARITY} to {MOST_SIMILARITY}"
            )
        from datasketch import MinHashLSH

        chosen = MinHashLSH(similarity, HASHES, weights=_MISSED)
        self.bands, self.rows, self._similarity = chosen.b, chosen.r, similarity
        self._signatures, self._count = np.empty((0, HASHES), np.uint32), 0  # only the first _count rows are in use
        self._sorted: list[tuple[np.ndarray, np.ndarray]] = []  # (band keys, documents), ever shorter

    def add(self, added: np.ndarray) -> None:
        """Adds the signatures of documents, uint32 [N, HASHES]."""
        if not len(added):
            return
        count = self._count + len(added)
        if count > len(self._signatures):
            larger = np.empty((max(count, 2 * len(self._signatures)), HASHES), np.uint32)
            larger[: self._count] = self._signatures[: self._count]
            self._signatures = larger
        self._signatures[self._count : count] = added
        keys, documents = self._keys(added).ravel(), np.repeat(np.arange(self._count, count), self.bands)
        self._count = count
        while self._sorted and len(self._sorted[-1][0]) < 2 * len(keys):
            more_keys, more_documents = self._sorted.pop()
            keys, documents = np.concatenate([more_keys, keys]), np.concatenate([more_documents, documents])
        order = np.argsort(keys, kind="stable")
        self._sorted.append((keys[order], documents[order].astype(np.uint32)))

    def repeats(self, following: np.ndarray) -> np.ndarray:
        """Returns whether each document nearly repeats an earlier one, bool [N].

        `following` has their signatures, uint32 [N, HASHES]; those that are no repeats are added.
        """
        keys, found = self._keys(following), np.zeros(len(following), bool)
        earlier = self._with_equal_bands(keys)
        here: dict[int, list[int]] = {}  # documents of this array by their band keys
        for place, row in enumerate(keys.tolist()):
            beside = sorted({other for key in row for other in here.get(key, ())})
            if earlier[place] or beside:
                candidates = np.concatenate([self._signatures[earlier[place]], following[beside]])
                found[place] = ((candidates == following[place]).mean(1) >= self._similarity).any()
            for key in () if found[place] else row:
                here.setdefault(key, []).append(place)
        self.add(following[~found])
        return found

    def _keys(self, signatures: np.ndarray) -> np.ndarray:
        """Returns a hash of each band of each signature, uint64 [N, bands]."""
        places = signatures[:, : self.bands * self.rows].reshape(-1, self.bands, self.rows).astype(np.uint64)
        keys = np.broadcast_to(np.arange(self.bands, dtype=np.uint64), places.shape[:2])
        for row in range(self.rows):
            keys = permutation.mixed(keys ^ permutation.mixed(places[:, :, row]))
        return keys

    def _with_equal_bands(self, keys: np.ndarray) -> list[list[int]]:
        """Returns, for each document, the documents added before that share one of its bands."""
        found: list[set[int]] = [set() for _ in keys]
        for known, documents in self._sorted:
            begins, ends = np.searchsorted(known, keys), np.searchsorted(known, keys, side="right")
            for place, band in np.argwhere(begins < ends).tolist():
                found[place].update(documents[begins[place, band] : ends[place, band]].tolist())
        return [sorted(each) for each in found]
