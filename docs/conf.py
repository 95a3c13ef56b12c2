"""Settings of the site that docs/build.sh makes with Sphinx: Markdown by MyST, docstrings by autodoc and napoleon."""

import pathlib
import re
import sys

from pygments.lexers.python import PythonLexer

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path += map(str, (ROOT / ".venv" / "lib").glob("python*/site-packages"))  # after the packages of this environment

project = "Renga"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", ".venv"]
html_theme = "furo"
html_title = "Renga"
html_static_path = ["pictures", "site.css"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False

myst_heading_anchors = 4  # of the same names as GitHub's
smartquotes = False  # it turns --flag into a dash
myst_enable_extensions = ["colon_fence"]
highlight_language = "text"  # of blocks without a language: commands
default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # a docstring says what a type does not
autodoc_preserve_defaults = True
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # names of attributes, such as `seed`, are those of several classes

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def without_links_to_code(app, page, source):
    """Shows a link to a file outside docs/ as the name of the file: the site has pages alone."""

    def plain(match):
        text, target = match[1], match[2].partition("#")[0]
        path = (pathlib.Path(app.srcdir, page).parent / target).resolve()
        if path.is_relative_to(app.srcdir):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    source[0] = OUTSIDE.sub(plain, source[0])


def as_restructured_text(app, what, name, obj, options, lines):
    """Changes a docstring in place: an indented block becomes literal, and `x`s and * mean what they say."""
    text, section = [], re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Note)s?:$")
    for before, line in zip(["", *lines], lines, strict=False):
        parts = re.split(r"(`[^`]*`)", line)
        line = "".join(part if part[:1] == "`" else re.sub(r"\*|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts)
        line = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line)
        last = next((each for each in reversed(text) if each), "")
        if line.startswith("    ") and not before and last[:1] != " " and not section.match(last):
            text += ["::", ""]
        text.append(line)
    lines[:] = text


def setup(app):
    """Registers the change of links and docstrings, and shows gin files as the Python that they look like."""
    app.add_lexer("gin", PythonLexer)
    app.connect("source-read", without_links_to_code)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
