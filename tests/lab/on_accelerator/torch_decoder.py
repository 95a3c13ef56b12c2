"""Training steps and generation of a Llama by transformers; prints a line of JSON for each figure.

It runs in an environment of its own: `python -P torch_decoder.py '{"num_layers": …}'`. Parameters, softmax and loss are
float32, products bfloat16 by autocast; attention and AdamW are PyTorch's fused ones. On GPUs the model is compiled; on
CPUs that would need a C++ compiler.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS, WARM_UP, TURNS = 10, 3, 3


def main(asked: dict[str, Any]) -> None:
    """Measures on a GPU, or on the CPU if a rehearsal asks for it."""
    import torch
    import transformers

    if not asked["on_cpu"] and not torch.cuda.is_available():
        _say(absent="this PyTorch finds no GPU")
        return
    device = "cpu" if asked["on_cpu"] else "cuda"
    _say(what="versions", value=f"transformers {transformers.__version__}, torch {torch.__version__}")
    config = transformers.LlamaConfig(
        vocab_size=asked["vocab_size"],
        hidden_size=asked["embed_dim"],
        intermediate_size=asked["mlp_dim"],
        num_hidden_layers=asked["num_layers"],
        num_attention_heads=asked["num_heads"],
        num_key_value_heads=asked["num_kv_heads"],
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    rows = asked["rows"]
    while rows:
        try:
            _train(torch, model, rows, asked, device)
            break
        except torch.OutOfMemoryError:
            rows //= 2
            model.zero_grad()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch._dynamo.reset()  # or another number of rows is compiled with shapes of any size
    _generate(torch, model, asked, device)


def _train(torch: Any, model: Any, rows: int, asked: dict[str, Any], device: str) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    form = torch.compile(model) if device == "cuda" else model
    shape = (rows, asked["length"] + 1)
    ids = torch.randint(0, asked["vocab_size"], shape, device=device)

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = form(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    begin = time.perf_counter()
    step().item()
    _say(what="first step after", value=time.perf_counter() - begin, unit="s")
    for _ in range(WARM_UP - 1):
        step().item()
    begin = time.perf_counter()
    losses = [step() for _ in range(STEPS)]
    losses[-1].item()  # waits for the device
    seconds = (time.perf_counter() - begin) / STEPS
    _say(what="rows", value=rows)
    _say(what="tokens/s", value=rows * asked["length"] / seconds)
    if device == "cuda":
        _say(what="peak memory", value=torch.cuda.max_memory_allocated() / 2**30, unit="GiB")


def _generate(torch: Any, model: Any, asked: dict[str, Any], device: str) -> None:
    model.to(torch.bfloat16).eval()
    lengths = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    for rows in asked["batches"]:
        ids = torch.randint(1, asked["vocab_size"], (rows, asked["prompt"]), device=device)

        def seconds(count: int, ids: Any = ids) -> float:
            begin = time.perf_counter()
            with torch.no_grad():
                exact = {"max_new_tokens": count, "min_new_tokens": count}
                model.generate(ids, attention_mask=torch.ones_like(ids), **exact, **lengths)[0, -1].item()
            return time.perf_counter() - begin

        _say(what=f"new tokens/s, batch {rows}", value=rows * asked["new"] / _difference(seconds, asked["new"]))


def _difference(seconds: Callable[[int], float], new: int) -> float:
    """Returns the seconds of `new` tokens, without the time of the prompt."""
    seconds(1)
    return statistics.median(seconds(1 + new) - seconds(1) for _ in range(TURNS))


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
