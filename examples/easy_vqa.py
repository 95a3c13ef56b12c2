"""Writes the questions of the package easy-vqa as files that `tasks.vision` reads.

    pip download --no-deps easy-vqa==1.0 -d /tmp/easy_vqa && unzip -q /tmp/easy_vqa/*.whl -d /tmp/easy_vqa
    .venv/bin/python examples/easy_vqa.py /tmp/easy_vqa/easy_vqa/data ~/easy_vqa

The result is a folder with train.jsonl, curriculum.jsonl (train.jsonl with other weights), validation.jsonl (questions
about every tenth image for training), test.jsonl and a tokenizer with an id for each word. The package is by Victor
Zhou, 5,000 images of one colored shape each.

Three quarters of the answers are yes or no, and the question alone, without the image, predicts four fifths of these.
The weights in train.jsonl make yes and no equally frequent for each question, and draw questions about shapes more
often. Those in curriculum.jsonl also make negated questions rare, from which little can be learned before shapes and
colors are known.
"""

import argparse
import collections
import json
import pathlib
import re

KINDS = ("yes_no", "shape", "colour")  # as datasets have them
SHAPES = ("circle", "rectangle", "triangle")
FACTORS = {"yes_no": 0.5, "shape": 3.0, "colour": 1.5}
NEGATED = 0.03


def kind_of(answer):
    """Returns the kind of a question, given its answer: "yes_no", "shape" or "colour"."""
    return "yes_no" if answer in ("yes", "no") else "shape" if answer in SHAPES else "colour"


def words(text):
    """Splits a text into lowercase words and punctuation marks, which become the tokens."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def lines_of(folder, split):
    """Returns the questions of a split ("train" or "test") of the package, each with the number of its image."""
    found = json.loads((folder / split / "questions.json").read_text())
    return [
        {
            "image": str((folder / split / "images" / f"{number}.png").resolve()),
            "question": " ".join(words(question)),
            "answer": answer,
            "kind": kind_of(answer),
            "number": number,
        }
        for question, answer, number in found
    ]


def weighted(lines, *, negated):
    """Yields the lines with weights: by kind and, for yes or no, by how often the question has the answer.

    `negated` multiplies the weights of questions with "not" or "no".
    """
    questions = collections.Counter(line["question"] for line in lines)
    pairs = collections.Counter((line["question"], line["answer"]) for line in lines)
    for line in lines:
        is_negated = {"not", "no"} & set(line["question"].split())
        weight = FACTORS[line["kind"]] * (negated if is_negated else 1.0)
        if line["kind"] == "yes_no":
            weight *= questions[line["question"]] / pairs[line["question"], line["answer"]]
        yield {**line, "weight": round(weight, 4)}


def write_tokenizer(folder, vocabulary):
    """Writes a tokenizer with an id for each word, and returns the number of ids.

    Id 0 is `<end>`, which ends documents and stands for unknown words.
    """
    ids = {word: number for number, word in enumerate(["<end>", *sorted(vocabulary)])}
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<end>"}
    end = {"id": 0, "content": "<end>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}\n')
    return len(ids)


def main(source, target):
    """Converts `source`, the folder `data` of the package, to files in the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    train, test = lines_of(source, "train"), lines_of(source, "test")
    held_out = [line for line in train if line["number"] % 10 == 0]
    train = [line for line in train if line["number"] % 10]
    files = {
        "train": weighted(train, negated=1.0),
        "curriculum": weighted(train, negated=NEGATED),
        "validation": held_out,
        "test": test,
    }
    for name, lines in files.items():
        (target / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = write_tokenizer(target, {word for line in train for word in (*line["question"].split(), line["answer"])})
    print(f"{target}: {len(train)} + {len(held_out)} + {len(test)} questions, {size} words")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="the folder data of the package")
    parser.add_argument("target", type=pathlib.Path, help="the folder to write")
    arguments = parser.parse_args()
    main(arguments.source, arguments.target)
