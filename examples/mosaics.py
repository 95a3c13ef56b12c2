"""Writes mosaics of the images of the package easy-vqa, with questions that each ask about one cell.

    .venv/bin/python examples/mosaics.py /tmp/easy_vqa/easy_vqa/data ~/mosaics2 --grid 2

`examples/easy_vqa.py` says how to get the package. The result is a folder that `tasks.vision` reads: the images, a
file of training for each kind of question (train_place.jsonl and so on), validation.jsonl, test.jsonl, and a tokenizer
with an id for each word. A mosaic of 2 x 2 images has 128 x 128 pixels, one of 3 x 3 has 192 x 192. The same arguments
write the same files.

    place      what color is top left ?
    attribute  what color is the circle ?                   one cell has a circle
    relation   what shape is left of the red shape ?        one cell is red, and one is left of it in its row
    yes_no     is the shape above the circle red ?          each text has as many answers yes as no

A line has the number of cells along a side, `grid`, and the cells that its question is about, `cells`, numbered row by
row from 0: first the cell whose shape or color is asked for and, in questions with a relation, then the cell that they
name. Tests are made of the package's images for tests, and validation of every tenth image for training. With the
weights of the lines, all kinds are drawn equally often if the files are read together.
"""

import argparse
import collections
import itertools
import json
import pathlib
from typing import NamedTuple

import easy_vqa
import numpy as np
from PIL import Image, UnidentifiedImageError

KINDS = ("place", "attribute", "relation", "yes_no")
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SIDE = 64  # pixels of an image of the package
ROWS = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
COLUMNS = {2: ("left", "right"), 3: ("left", "center", "right")}
STEPS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
MOSAICS = {"train": 8000, "validation": 600, "test": 600}
OF_A_KIND = 2  # questions of each kind about a mosaic; of yes_no, this many by place, by attribute and by relation


class Cell(NamedTuple):
    """One image of a mosaic: what is on it, and its file."""

    shape: str
    color: str
    file: pathlib.Path


class Pointer(NamedTuple):
    """Words that single out a cell.

    Attributes:
      kind: one of the first three of `KINDS`.
      words: such as "top left", "the circle" or "left of the circle".
      cells: the cell that is meant, and the one that the words name, if that is another.
      given: what the words say of the cell that is meant: "shape", "color" or "".
    """

    kind: str
    words: str
    cells: tuple[int, ...]
    given: str = ""


def known_images(folder, split):
    """Returns, by image number, the images of a split whose shape and color the package's questions tell."""
    found = collections.defaultdict(dict)
    for line in easy_vqa.lines_of(folder, split):
        said, answer = line["question"].split(), line["answer"]
        named = [answer] if answer not in ("yes", "no") else []
        if not named or {"circle", "rectangle", "triangle", *COLORS} & set(said):
            is_there = (answer != "no") != bool({"not", "no"} & set(said))
            named += said if is_there else []
        facts = found[line["number"]]
        facts["file"] = pathlib.Path(line["image"])
        for fact, values in (("shape", easy_vqa.SHAPES), ("color", COLORS)):
            facts.update((fact, word) for word in named if word in values)
    return {number: Cell(**facts) for number, facts in sorted(found.items()) if len(facts) == 3}


def pointers(cells, grid):
    """Yields every unambiguous pointer to a cell of a mosaic."""
    for number in range(len(cells)):
        row, column = divmod(number, grid)
        yield Pointer("place", f"{ROWS[grid][row]} {COLUMNS[grid][column]}", (number,))
    for given in ("shape", "color"):
        counts = collections.Counter(getattr(cell, given) for cell in cells)
        for number, cell in enumerate(cells):
            value = getattr(cell, given)
            if counts[value] > 1:
                continue
            name = f"the {value}" if given == "shape" else f"the {value} shape"
            yield Pointer("attribute", name, (number,), given)
            for words, step in STEPS.items():
                row, column = np.add(divmod(number, grid), step)
                beyond = np.add((row, column), step)
                if inside((row, column), grid) and not inside(beyond, grid):
                    yield Pointer("relation", f"{words} {name}", (int(row * grid + column), number))


def inside(place, grid):
    """Returns whether `place`, a row and a column, is a cell of a mosaic with `grid` cells along a side."""
    return all(0 <= at < grid for at in place)


def open_question(pointer, cells, asked):
    """Returns a question for the "shape" or "color" (`asked`) of a cell, and its answer."""
    return f"what {asked} is {pointer.words} ?", getattr(cells[pointer.cells[0]], asked)


def closed_question(pointer, cells, asked, answer, rng):
    """Returns a question about the shape or color of a cell with the answer `answer`, "yes" or "no"; and `answer`."""
    values = easy_vqa.SHAPES if asked == "shape" else COLORS
    true = getattr(cells[pointer.cells[0]], asked)
    value = true if answer == "yes" else str(rng.choice([other for other in values if other != true]))
    of = {"place": f"the {pointer.words} shape", "relation": f"the shape {pointer.words}"}
    return f"is {of.get(pointer.kind, pointer.words)} {value if asked == 'color' else f'a {value}'} ?", answer


def questions_about(cells, grid, rng):
    """Yields questions about a mosaic: text, answer, kind and cells."""
    by_kind = collections.defaultdict(list)
    for pointer, asked in itertools.product(pointers(cells, grid), ("shape", "color")):
        if asked != pointer.given:
            by_kind[pointer.kind].append((pointer, asked))
    for kind in KINDS[:3]:
        choices = by_kind[kind]
        for number in rng.permutation(len(choices))[:OF_A_KIND]:
            pointer, asked = choices[number]
            yield *open_question(pointer, cells, asked), kind, pointer.cells
        for number in rng.permutation(len(choices))[:OF_A_KIND]:
            pointer, asked = choices[number]
            yield *closed_question(pointer, cells, asked, str(rng.choice(["yes", "no"])), rng), "yes_no", pointer.cells


def balanced(lines):
    """Leaves out yes/no questions, the last of each text, so that every text has as many answers yes as no."""
    seen = collections.defaultdict(lambda: {"yes": [], "no": []})
    for number, line in enumerate(lines):
        if line["kind"] == "yes_no":
            seen[line["question"]][line["answer"]].append(number)
    left_out = set()
    for answers in seen.values():
        most = min(map(len, answers.values()))
        left_out |= {number for found in answers.values() for number in found[most:]}
    return [line for number, line in enumerate(lines) if number not in left_out]


def write_mosaics(target, split, images, *, grid, count, seed):
    """Writes `count` mosaics of the given images for a split; returns the lines of their questions."""
    rng, lines = np.random.default_rng((seed, grid, sorted(MOSAICS).index(split))), []
    (target / "images" / split).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        cells = [images[i] for i in rng.choice(len(images), grid * grid, replace=False)]
        pixels = [read_image(cell.file) for cell in cells]
        rows = [np.concatenate(pixels[start : start + grid], axis=1) for start in range(0, grid * grid, grid)]
        name = f"images/{split}/{number}.png"
        Image.fromarray(np.concatenate(rows)).save(target / name)
        for question, answer, kind, about in questions_about(cells, grid, rng):
            line = {"image": name, "question": question, "answer": answer, "kind": kind, "grid": grid}
            lines.append({**line, "cells": list(about)})
    return weighted(balanced(lines))


def read_image(file):
    """Returns the pixels of an image of the package, [SIDE, SIDE, 3]; ends the program if it is not such an image."""
    try:
        with Image.open(file) as found:
            pixels = np.asarray(found.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise SystemExit(f"{file} cannot be read as an image ({error})") from error
    if pixels.shape != (SIDE, SIDE, 3):
        raise SystemExit(f"{file} has {pixels.shape[1]} x {pixels.shape[0]} pixels; expected {SIDE} x {SIDE}")
    return pixels


def weighted(lines):
    """Adds weights, by which all kinds are drawn equally often."""
    counts = collections.Counter(line["kind"] for line in lines)
    return [{**line, "weight": round(len(lines) / len(counts) / counts[line["kind"]], 4)} for line in lines]


def main(source, target, *, grid=2, mosaics=MOSAICS, seed=0):
    """Makes mosaics of the images in `source`, the folder `data` of the package, and writes them to `target`."""
    if not (source / "train" / "questions.json").is_file():
        raise SystemExit(f"{source} has no train/questions.json; expected the folder data of the package easy-vqa")
    train, test = (known_images(source, split) for split in ("train", "test"))
    images = {
        "train": [cell for number, cell in train.items() if number % 10],
        "validation": [cell for number, cell in train.items() if number % 10 == 0],
        "test": list(test.values()),
    }
    target.mkdir(parents=True, exist_ok=True)
    words, told = set(), []
    for split, cells in images.items():
        lines = write_mosaics(target, split, cells, grid=grid, count=mosaics[split], seed=seed)
        for kind in KINDS if split == "train" else ("",):
            file = target / (f"{split}_{kind}.jsonl" if kind else f"{split}.jsonl")
            own = (line for line in lines if line["kind"] == kind or not kind)
            file.write_text("".join(json.dumps(line) + "\n" for line in own))
        words |= {word for line in lines for word in (*line["question"].split(), line["answer"])}
        told.append(f"{len(lines)} questions about {mosaics[split]} mosaics of {len(cells)} images for {split}")
    print(f"{target}: {', '.join(told)}; {easy_vqa.write_tokenizer(target, words)} words")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="the folder data of the package")
    parser.add_argument("target", type=pathlib.Path, help="the folder to write")
    parser.add_argument("--grid", type=int, choices=sorted(ROWS), default=2, help="images along a side of a mosaic")
    arguments = parser.parse_args()
    main(arguments.source, arguments.target, grid=arguments.grid)
