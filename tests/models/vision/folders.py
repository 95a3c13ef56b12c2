"""Folders of tiny published models of images and text, whose chat templates suit fine-tuning."""

import json
import pathlib
import shutil

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "images"
PHOTO = FIXTURES / "photo.png"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | upper }}:{% for c in m['content'] %}{% if c['type'] == 'image' %} <image>"
    "{% else %} {{ c['text'] }}{% endif %}{% endfor %}END {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def copied(name, to, *, end=""):
    """Copies a folder, with a chat template whose prompts are the beginnings of its conversations."""
    folder = shutil.copytree(FIXTURES / name, to / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = TEMPLATE.replace("END", f"{{% if m['role'] == 'assistant' %}}{end}{{% endif %}}" if end else "")
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return str(folder)
