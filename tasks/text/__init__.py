"""Text tasks: the constructors that a gin configuration names."""

from tasks.text.constructors import chats, files, huggingface, mixture, python_source, seqio, tfds, tokens

__all__ = ["chats", "files", "huggingface", "mixture", "python_source", "seqio", "tfds", "tokens"]
