"""Reads the CSV files of public benchmarks, with one puzzle per row."""

import csv
from collections.abc import Iterator, Mapping

from core.errors import UserError
from core.files import paths

COLUMNS = ("source", "question", "answer", "rating")

Row = Mapping[str, str]


def rows(file: paths.Path) -> Iterator[tuple[int, Row]]:
    """Yields (line number, row) of a file. Raises UserError if a column is missing."""
    try:
        with file.open("r") as stream:
            reader = csv.DictReader(stream)
            missing = [c for c in COLUMNS[1:] if c not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{file} has columns {reader.fieldnames}, expected {', '.join(COLUMNS)}")
            for row in reader:
                yield reader.line_num, row
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{file} does not exist; csv names the folder that holds train.csv and test.csv") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not text in UTF-8 ({error}); if it is compressed, unpack it first") from error


def rating(row: Row, file: paths.Path, number: int) -> int:
    """Returns the difficulty rating of a puzzle. Raises UserError if it is not an integer."""
    try:
        return int(row["rating"])
    except (TypeError, ValueError):
        raise UserError(f"{file}, line {number}: rating is {row['rating']!r}, expected an integer") from None
