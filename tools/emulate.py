"""Training as over given links: no message arrives and no task ends earlier than they say. One machine.

    torchrun --nproc-per-node 20 -m tools.emulate --links links.json --time-scale 0.1 [options of train.py]

For comparing an iteration's time with what skippipe.simulate makes of the same network: metrics.jsonl has
both, in the links' seconds.
"""
import os
import time
from dataclasses import dataclass

import torch

from planning.replan import Timed
from planning.training import read_links
from plumbing.options import option, parse_options
from plumbing.processes import BadInput, Job
from skippipe import WORK, kind
from train import Options, Pipeline, ReplanningRoutes, build, tag, train

NOTE = 2048     # added to a message's tag: a path has fewer hops


@dataclass
class Emulation(Options):
    time_scale: float = option(1.0, "seconds of ours per second of the links", least=1e-6)


def main(argv=None):
    job = Job(argv)
    given = job.agree(parse, argv)
    scale, o = given.pop("time_scale"), Options(**given)
    job.connect(o)
    replans = dict(Pipeline=TimedEmulation, Routes=ReplanningRoutes)
    run = build(job, o, **replans if o.replan else dict(Pipeline=EmulatedPipeline))
    run.routes.pace = run.pipeline.scale = scale
    # The file's network, not the plan's: a plan may be for ranks that have become slower.
    run.pipeline.network = job.together(read_links, o.links, run.stages, name="emulated links")
    train(run)


def parse(argv, world):
    o = parse_options(Emulation, argv, world, __doc__)
    if not o.links or world == 1 or int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
        # they share a clock
        raise BadInput("tools.emulate needs --links FILE and several processes, all on one machine")
    o.device, o.backend = "cpu", "gloo"
    return o


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


class EmulatedPipeline(Pipeline):
    """A note goes ahead of each message: its arrival, in seconds of the clock that all processes share.

    network: a skippipe.Network. scale: seconds of ours per second of the network.
    """
    usable, runs = 0.0, 0       # when the last task's overhead ends; runs that trained

    def run(self, paths, batches, train=True, order=None):
        if train:
            self.runs += 1
            self.job.share(f"run/{self.runs}", "")          # all begin together: the time is this run's own
        return super().run(paths, batches, train, order)

    def take(self, u, hop):
        x = super().take(u, hop)
        if self.train:
            source, note = self.chains[u][hop - 1], torch.tensor([self.usable], dtype=torch.float64)
            if hop and source != self.rank:
                torch.distributed.recv(note, source, tag=tag(u, hop) + NOTE)
            sleep_until(max(note.item(), self.usable))
        self.start = time.monotonic()
        return x

    def task(self, u, hop, x):
        out = super().task(u, hop, x)
        if self.train:
            seconds = WORK[kind(self.paths[u], hop)] * self.network.compute[self.rank]
            sleep_until(self.start + seconds * self.scale)
            rest = self.network.overhead if hop else self.network.origin_overhead
            self.usable = time.monotonic() + rest * self.scale
        return out

    def send(self, tensor, to, u, hop):
        if self.train:
            arrival = time.monotonic() + self.network.delay[self.rank][to] * self.scale
            note = torch.tensor([arrival], dtype=torch.float64)
            work = torch.distributed.isend(note, to, tag=tag(u, hop) + NOTE)
            self.sent[u, hop + NOTE] = work, note, to       # `run` waits for it at the end
        return super().send(tensor, to, u, hop)


class TimedEmulation(Timed, EmulatedPipeline):
    """For --replan."""


if __name__ == "__main__":
    main()
