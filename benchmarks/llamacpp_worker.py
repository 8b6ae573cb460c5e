"""Runs llama.cpp, through its Python binding, for `benchmarks/llamacpp.py`: one model, one turn per line of standard input.

A line is {"tokens": [ids], "new_tokens": n}; the answer is a line of JSON. It runs in an environment of its own, in which only
the binding (llama-cpp-python) and numpy are installed, so nothing of kaminari is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


def main() -> None:
    """Load a model and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--no-mmap", action="store_true", help="read the file into allocated memory")
    options = parser.parse_args()
    model = llama_cpp.Llama(
        options.gguf,
        n_ctx=options.context,
        n_batch=options.context,
        n_ubatch=512,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        use_mmap=not options.no_mmap,
        verbose=False,
    )
    facts = {"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(turn(model.ctx, model.n_vocab(), asked["tokens"], asked["new_tokens"])), flush=True)


def turn(context: Any, vocabulary: int, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Prefill and decode greedily, past end tokens; seconds to the first token and of all further ones."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    started = time.perf_counter()
    token = decode(context, vocabulary, prompt)
    first = time.perf_counter()
    generated = [token]
    for _ in range(new_tokens - 1):
        generated.append(decode(context, vocabulary, [generated[-1]]))
    ended = time.perf_counter()
    return {"ttft": first - started, "seconds": ended - first, "tokens": generated}


def decode(context: Any, vocabulary: int, tokens: list[int]) -> int:
    """Run some tokens; the likeliest next one."""
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens)))
    if code:
        raise RuntimeError(f"llama_decode returned {code}")
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocabulary,))
    return int(logits.argmax())


if __name__ == "__main__":
    main()
