"""Text tasks: the constructors that a gin configuration names, such as `text.python_source` and `text.files`."""

from tasks.text.constructors import chats, files, huggingface, mixture, python_source, seqio, tfds, tokens

__all__ = ["chats", "files", "huggingface", "mixture", "python_source", "seqio", "tfds", "tokens"]
