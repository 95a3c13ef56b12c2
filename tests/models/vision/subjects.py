"""A small model that sees images, and batches of two packed images with questions in each row."""

import numpy as np

from models.decoder import transformer
from models.vision.model import VisionLanguageModel
from models.vision.selector import Selector
from models.vision.tower import VisionTower

ROWS, QUESTION, ANSWER = 16, 3, 1
BEFORE = 2  # words before each image of `asked`
VOCAB, PATCHES, CHOSEN = 203, 16, 4
DECODER = transformer.Transformer(
    vocab_size=VOCAB, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=4, dtype="float32"
)
TOWER = VisionTower(image_size=16, patch_size=4, num_layers=2, embed_dim=24, mlp_dim=32, num_heads=4)
AXES = {
    "images": ("batch", None, None, None, None),
    "slots": ("batch", None),
    **dict.fromkeys(("inputs", "targets", "weights", "segment_ids", "positions", "until"), ("batch", "length")),
}


def model(method="soft", *, chosen=CHOSEN, **changes):
    return VisionLanguageModel(
        decoder=changes.pop("decoder", DECODER),
        vision=changes.pop("vision", TOWER),
        selector=Selector(num_chosen=chosen, method=method, width=8, balancer_width=8, temperature_steps=4),
        **changes,
    )


def batch(slots=PATCHES, *, rows=ROWS, seed=0):
    """Rows of two segments: image, question of 3 tokens, answer of 1 token."""
    rng = np.random.default_rng(seed)
    size = slots + QUESTION + ANSWER
    place = np.arange(2 * size)
    inside, segment = place % size, place // size
    words = rng.integers(0, VOCAB, (rows, 2 * size), dtype=np.int32)
    until = np.where(inside < slots + QUESTION, segment * size + slots + QUESTION - 1, place)

    def rowwise(a, dtype=np.int32):
        return np.broadcast_to(a, (rows, *a.shape)).astype(dtype)

    return {
        "images": rng.integers(0, 256, (rows, 2, 16, 16, 3), dtype=np.uint8),
        "slots": rowwise(np.concatenate([np.arange(slots), size + np.arange(slots)])),
        "inputs": np.where(inside < slots, 0, words).astype(np.int32),
        "targets": np.roll(words, -1, axis=1),
        "weights": rowwise(inside == slots + QUESTION - 1, np.float32),
        "segment_ids": rowwise(1 + segment),
        "positions": rowwise(inside),
        "until": rowwise(until),
    }


def asked(slots=PATCHES, *, images=1, rows=4, seed=0):
    """Rows of two segments: words and an image, so many times, a question and an answer; also where words are."""
    rng = np.random.default_rng(seed)
    segment = np.array(([0] * BEFORE + [1] * slots) * images + [0] * (QUESTION + ANSWER))
    is_slot, size = np.tile(segment, 2) > 0, len(segment)
    place = np.arange(2 * size)
    inside = place % size
    last = size - ANSWER - 1  # of the question
    inputs = np.zeros((rows, 2 * size), np.int32)
    inputs[:, ~is_slot] = rng.integers(0, VOCAB, (rows, 2 * (images * BEFORE + QUESTION + ANSWER)))

    def rowwise(a, dtype=np.int32):
        return np.broadcast_to(a, (rows, *a.shape)).astype(dtype)

    return {
        "images": rng.integers(0, 256, (rows, 2 * images, 16, 16, 3), dtype=np.uint8),
        "slots": rowwise(np.flatnonzero(is_slot)),
        "inputs": inputs,
        "targets": np.roll(inputs, -1, axis=1),
        "weights": rowwise(inside == last, np.float32),
        "segment_ids": rowwise(1 + place // size),
        "positions": rowwise(inside),
        "until": rowwise(np.where(inside <= last, place - inside + last, place)),
    }, ~is_slot


def with_slots(wide):
    """The same questions with slots for the chosen patches alone."""
    narrow = batch(CHOSEN, rows=len(wide["inputs"]))
    size, less = PATCHES + QUESTION + ANSWER, CHOSEN + QUESTION + ANSWER
    for name in ("inputs", "targets"):
        for part in range(2):
            narrow[name][:, part * less + CHOSEN : (part + 1) * less] = wide[name][
                :, part * size + PATCHES : (part + 1) * size
            ]
    return {**narrow, "images": wide["images"]}
