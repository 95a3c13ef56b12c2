"""transformers in an environment of its own, which continues prompts on request.

`Peer` starts this file with the Python of that environment. It reads lines of JSON from standard input, each
`[prompts, number of tokens]`, and answers with the new ids.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any


class Peer:
    """The process; a context manager.

    Attributes:
      versions: of its libraries, and its number of threads.
    """

    def __init__(self, python: str, folder: str, dtype: str):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([python, __file__, folder, dtype], stdin=pipe, stdout=pipe, text=True)
        self.versions = self._answer()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Returns `count` greedy ids for each prompt; all prompts have the same length."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([prompts, count]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            from core.errors import UserError  # not importable where this file runs as a program

            command = " ".join(map(str, self._process.args[:1]))
            code = self._process.wait()
            raise UserError(f"--python {command}: transformers ended with exit code {code}; see the messages above")
        return json.loads(line)


def _serve(folder: str, dtype: str) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    print(json.dumps(f"{versions}, {torch.get_num_threads()} threads"), flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        print(json.dumps(found[:, ids.shape[1] :].tolist()), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
