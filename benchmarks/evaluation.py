"""The evaluations that docs/evaluation.md shows: bundled readers on generated pages.

    python benchmarks/evaluation.py                          # everything, about twenty minutes on two quiet cores
    python benchmarks/evaluation.py --models qwen3vl --only sweep

Pages are generated into build/evaluation, reports go to benchmarks/results; then run `make docs`. Accuracy is the same on every
run; speed and memory are those of the machine as it was.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PAGES = Path("build/evaluation")
RESULTS = Path("benchmarks/results")


class Study(NamedTuple):
    """A set (kinds with counts, damages) and what `kaminari eval` does with it."""

    kinds: str
    damage: str
    options: str


STUDIES = {
    "kinds": Study("line=60 receipt=20 form=20 table=20 text=20 long=2 blank=10", "", "--visual-tokens 128"),
    "damage": Study("line=30 receipt=10 form=10 text=10", "all", ""),
    "sweep": Study(
        "line=12 receipt=6 form=4 table=3 text=4 tall=3",
        "",
        "--sweep quantizer=none,int8,int4 tokens=64,128,256,512 sizing=bucket,exact",
    ),
    "long": Study("long=3", "", "--sweep tokens=64,128,256,512"),
    "draft": Study("line=12 receipt=6 form=4 table=3 text=4", "", "--sweep draft=none,prompt-lookup slots=1,4"),
    "calibration": Study("line=60 receipt=16 form=16 text=16", "blur,noise,jpeg", "--calibrate"),
}


def run(*command: str | Path) -> None:
    """Run a command, shown first; ends the program when it fails."""
    words = [str(word) for word in command]
    print(shlex.join(words), flush=True)
    if code := subprocess.run(words, check=False).returncode:
        sys.exit(code)


def main() -> None:
    """Make the sets and run the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3vl,glmocr")
    parser.add_argument("--only", default=",".join(STUDIES), metavar="NAME,NAME", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seed", default="2026")
    options = parser.parse_args()
    kaminari = Path(sys.executable).parent / "kaminari"
    for name in options.only.split(","):
        study, folder = STUDIES[name], PAGES / name
        damage = ("--damage", study.damage) if study.damage else ()
        pages = ("--pages", *study.kinds.split())
        run(sys.executable, "scripts/make_pages.py", "--set", folder, *pages, *damage, "--seed", options.seed)
        for model in options.models.split(","):
            out = RESULTS / f"eval_{name}" / model
            run(
                kaminari, "eval", "--model", model, "--checkpoint", "tiny", "--set", folder, "--out", out,
                *study.options.split(),
            )  # fmt: skip
            # Each page with its text, and their pictures, are for reading once; what is kept are figures, and one set of plots.
            once = [*out.glob("eval.json"), *out.glob("*.html"), *(out.glob("*.svg") if name != "sweep" else ())]
            for file in once:
                file.rename(folder / f"{model}-{file.name}")


if __name__ == "__main__":
    main()
