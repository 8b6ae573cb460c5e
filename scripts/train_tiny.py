"""Train the bundled `tiny` checkpoint on CPU: `python scripts/train_tiny.py --plan whole --out build/train_tiny`.

Two processes of one thread each share every step: on matrices this small that is faster than one process of two threads.
OUT receives `log.jsonl`, `state.pt` (everything, for `--carry-on`) and `checkpoint/` (averaged weights in bf16).
`--resume FOLDER` starts from a checkpoint folder, for instance the committed one; `--evaluate FOLDER` measures one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import torch
import torch.distributed as distributed
from torch.multiprocessing.spawn import spawn

from training.batches import Batch, Stream
from training.check import check
from training.evaluate import held_out, measure
from training.family import FAMILIES
from training.losses import Weights, total_loss
from training.optimizer import Optimizer
from training.plan import TOWER_BUDGET, TOWER_MIX, Stage
from training.product import measure_product
from training.record import describe

WARM_STEPS = 50
SETTLE_STEPS = 200
SAVE_SECONDS = 90
# Averaging over about 500 steps; shorter at the start of a run.
AVERAGE = 0.998


class Trainer:
    """One of the processes: its copy of the weights, its stream of batches and, in process 0, the files."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        self.out: Path = options.out
        self.family = FAMILIES[options.architecture]()
        self.reader = self.family.load(options.resume) if options.resume else self.family.start()
        if not options.resume:
            self.reader.start_patch()
        self.optimizer = Optimizer(self.reader, options.muon_rate, options.adam_rate)
        self.average = {name: weight.detach().clone() for name, weight in self.reader.named_parameters()}
        self.step = self.characters = 0
        if options.carry_on:
            self._carry_on()
        self.began = self.saved_at = time.monotonic()

    def run(self) -> None:
        """Go through the plan's stages."""
        for stage in self.family.plans[self.options.plan][self.options.from_stage :]:
            self._run_stage(stage)
        self._save()

    def _run_stage(self, stage: Stage) -> None:
        seed = 1000 * self.options.seed + 10 * self.step + self.rank
        reading = iter(Stream(seed, stage.mix, stage.budget, self.reader.form))
        seeing = iter(Stream(seed + 2, stage.tower_mix or TOWER_MIX, TOWER_BUDGET, self.reader.form))
        self.reader.drafting = stage.weights.draft > 0
        began, first = time.monotonic(), self.step
        while True:
            # All processes must leave the stage at the same step: the first one's clock decides.
            spent = torch.tensor((time.monotonic() - began) / (60 * stage.minutes * self.options.stretch))
            distributed.broadcast(spent, 0)
            if spent >= 1:
                return
            rate = stage.rates[0] + (stage.rates[1] - stage.rates[0]) * float(spent)
            scale = rate * min(1.0, (self.step - first + 1) / WARM_STEPS)
            alone = self.step % stage.tower_every == 0
            self._update(next(seeing if alone else reading), stage.weights, alone, scale)
            if time.monotonic() - self.saved_at > SAVE_SECONDS:
                self._save()
                self.saved_at = time.monotonic()

    def _update(self, batch: Batch, weights: Weights, alone: bool, scale: float) -> None:
        """Make one step on a batch, on the vision tower `alone` or on everything."""
        self.reader.settling = self.options.resume is not None and self.step < SETTLE_STEPS
        with torch.autocast("cpu", torch.bfloat16):
            if alone:
                outputs = self.reader(batch.patches, batch.grid)
            else:
                outputs = self.reader(batch.patches, batch.grid, batch.ids, batch.positions, batch.answer)
        loss, parts = total_loss(outputs, batch, weights)
        self.reader.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = self.optimizer.share_gradients()
        self.optimizer.step(scale)
        self.step += 1
        self.characters += self.options.processes * int((batch.labels >= 0).sum())
        keep = min(AVERAGE, self.step / (self.step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.reader.parameters()), 1 - keep)
        if self.rank == 0 and self.step % 10 in (0, 1):
            self._log({"grid": list(batch.grid), "norm": round(norm, 3), "rate": round(scale, 3)}, parts)

    def _log(self, facts: dict[str, object], parts: dict[str, float]) -> None:
        record: dict[str, object] = {"step": self.step, "seconds": round(time.monotonic() - self.began, 1)}
        record |= {"characters": self.characters, **facts}
        record |= {name: round(value, 4) for name, value in parts.items()}
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def _save(self) -> None:
        if self.rank:
            return
        content = {
            "weights": self.reader.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "characters": self.characters,
        }
        part = self.out / "state.part"
        torch.save(content, part)
        part.rename(self.out / "state.pt")
        export(self.options.architecture, self.out / "state.pt", self.out / "checkpoint")

    def _carry_on(self) -> None:
        saved = torch.load(self.out / "state.pt")
        self.reader.load_state_dict(saved["weights"])
        self.average = saved["average"]
        self.optimizer.load_state(saved["optimizer"])
        self.step, self.characters = saved["step"], saved["characters"]


def export(architecture: str, state: Path, folder: Path) -> None:
    """Write the averaged weights of a run's state as a checkpoint folder."""
    family = FAMILIES[architecture]()
    reader = family.start()
    reader.load_state_dict(torch.load(state)["average"], strict=False)
    reader.fold_out()
    family.save(reader, folder)


def run(rank: int, options: argparse.Namespace) -> None:
    """Train as one of the processes."""
    # A session of its own: Linux shares processor time among sessions before it looks at niceness.
    os.setsid()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    distributed.init_process_group("gloo", rank=rank, world_size=options.processes)
    Trainer(rank, options).run()


def evaluate(architecture: str, folder: Path, out: Path) -> None:
    """Check and measure a checkpoint folder; write OUT/evaluation.json, and OUT/train_tiny.json when OUT holds a log."""
    torch.set_num_threads(1)
    family = FAMILIES[architecture]()
    reader = family.load(folder)
    check(reader, folder, held_out("line", 8) + held_out("few", 1))
    result = measure(reader)
    if family.drafts:
        result["product"] = measure_product(folder, architecture, draft=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    log, command = out / "log.jsonl", out / "command.txt"
    if log.exists():
        content = describe(command.read_text().strip(), log, result)
        (out / "train_tiny.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Read the command line, then train or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=sorted(FAMILIES), default="qwen3vl")
    parser.add_argument("--plan", default="whole", help="whole, further, or another of the architecture's plans")
    parser.add_argument("--from-stage", type=int, default=0, help="skip the plan's first stages")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="times the plan's minutes, for a slower or a busy machine"
    )
    parser.add_argument("--out", type=Path, default=Path("build/train_tiny"))
    parser.add_argument("--resume", type=Path, help="a checkpoint folder to start from")
    parser.add_argument("--carry-on", action="store_true", help="continue from OUT/state.pt, optimizer state included")
    parser.add_argument("--evaluate", type=Path, help="a checkpoint folder to measure instead of training")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--port", type=int, default=29611)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.evaluate:
        evaluate(options.architecture, options.evaluate, options.out)
        return
    (options.out / "command.txt").write_text(shlex.join(["python", *sys.argv]) + "\n")
    spawn(run, args=(options,), nprocs=options.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
