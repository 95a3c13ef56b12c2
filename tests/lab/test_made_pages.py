"""Pages and pictures that are made from the code, and the picture of the terminal."""

import argparse
import xml.etree.ElementTree as ElementTree

import pytest

from tests.lab import pictures, recording, reference

LOG = """\
╭─ renga ─╮
│ slice      v4-16: 8 chips │
│            on 2 hosts │
│ hosts      host 0: process 16161 on somewhere │
╰─────────╯
step      1/200  loss 5.98
step     10/200  loss 3.17
step     20/200  loss 2.56
step    200/200  loss 1.46
goodput 82.2 % over 1 start

The model continues 'import ':

os

run         runs/first
"""


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_that_need_no_run_are_current(name, tmp_path):
    pictures.save(pictures.PICTURES[name](), tmp_path / name)
    assert (tmp_path / name).read_bytes() == (pictures.FOLDER / name).read_bytes()


def test_the_terminal_shows_the_command_the_loss_and_the_sample():
    assert recording.excerpt(LOG) == [
        f"$ {recording.COMMAND}",
        "╭─ renga ─╮",
        "│ slice      v4-16: 8 chips │",
        "│            on 2 hosts │",
        "╰─────────╯",
        "step      1/200  loss 5.98",
        "…",
        "step    200/200  loss 1.46",
        "The model continues 'import ':",
        "os",
    ]


@pytest.mark.parametrize("text", [recording.picture(LOG), recording.badge("JAX", "0.10")], ids=["terminal", "badge"])
def test_a_picture_is_xml_without_an_address_to_load(text):
    ElementTree.fromstring(text)
    assert "url(http" not in text.replace('"', "")
    assert "href" not in text


def test_options_of_subcommands_and_choices_are_listed():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("a", "b"))
    children = parser.add_subparsers()
    child = children.add_parser("ls")
    child.add_argument("--keep", type=int, default=3, metavar="N", help="latest steps to keep (default: %(default)s)")
    assert list(reference._options(parser)) == [
        "* `kind`: One of a, b.",
        "* `ls --keep N`: Latest steps to keep (default: 3).",
    ]


def test_a_stale_page_is_named_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    monkeypatch.setattr(reference, "MAKERS", {"x.md": lambda: iter(["# X", "text"])})
    assert reference.run(argparse.Namespace(write=False)) == 1
    assert "docs/reference/x.md: not current" in capsys.readouterr().out
    assert reference.run(argparse.Namespace(write=True)) == 0
    assert (tmp_path / "x.md").read_text() == f"{reference.GENERATED}\n\n# X\ntext\n"
    assert reference.run(argparse.Namespace(write=False)) == 0
