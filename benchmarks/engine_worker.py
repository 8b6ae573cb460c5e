"""Runs an engine for `benchmarks/llamacpp.py`: one turn per line of standard input, as `llamacpp_worker.py` does for its side.

The first line of the answer has the prompt's tokens, so that the other side is given the same ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from contextlib import closing

import torch

from kaminari_core.bench import prompt_of
from kaminari_core.config import EngineConfig
from kaminari_core.ladder.contenders import serve_together
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry


def main() -> None:
    """Load a model and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--settings", default="{}", help="fields of EngineConfig, as JSON")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--small-pages", action="store_true", help="let the system give this process no huge pages")
    options = parser.parse_args()
    if options.small_pages:
        refuse_huge_pages()
    torch.set_num_threads(options.threads)
    config = EngineConfig(slots=1, max_length=options.context, **json.loads(options.settings))
    engine = open_engine(load_registry(), options.model, options.checkpoint, config, silent, warm_up=True)
    with closing(engine):
        request = prompt_of(engine, options.prompt_tokens)
        tokens = engine.model.prepare(request).tokens
        print(json.dumps({"tokens": tokens, "version": torch.__version__}), flush=True)
        for line in sys.stdin:
            [result] = serve_together(engine, request, json.loads(line)["new_tokens"], 1)
            timings = result.timings
            turn = {
                "ttft": timings.ttft,
                "seconds": timings.total - timings.ttft,
                "tokens": [token.id for token in result.tokens],
            }
            print(json.dumps(turn), flush=True)


def refuse_huge_pages() -> None:
    """Turn transparent huge pages off for this process, whatever its libraries ask for (prctl(2), PR_SET_THP_DISABLE)."""
    if ctypes.CDLL(None, use_errno=True).prctl(41, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "huge pages cannot be turned off")


if __name__ == "__main__":
    main()
