"""Training as over given links: no message arrives and no task ends earlier than they say. One machine.

    torchrun --nproc-per-node 20 -m tools.emulate --links links.json --time-scale 0.1 [options of train.py]

For comparing an iteration's time with what skippipe.simulate makes of the same network: metrics.jsonl has
both, in the links' seconds.
"""
import math
import os
import sys
import time

import torch

from planning.replan import Timed
from planning.training import read_links
from plumbing.options import Parser
from plumbing.processes import BadInput, Job
from skippipe import WORK, kind
from train import Options, Pipeline, ReplanningRoutes, build, parse, tag, train

NOTE = 2048     # added to a message's tag: a path has fewer hops


def main(argv=None):
    job = Job()
    if job.leaves_help(argv):
        return
    argv = sys.argv[1:] if argv is None else argv
    o, scale = job.agree_on("arguments", lambda: arguments(argv, job.world))
    o = Options(**o)
    job.connect(o)

    replans = dict(Pipeline=TimedEmulation, Routes=ReplanningRoutes)
    run = build(job, o, **replans if o.replan else dict(Pipeline=EmulatedPipeline))
    run.routes.pace = scale
    # as the file says, whatever the plan is for by now
    network = job.together(read_links, o.links, run.stages, name="emulated links")
    run.pipeline.follow(network, scale)
    train(run)


def arguments(argv, world):
    parser = Parser(__doc__)
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds of ours per one of the links")
    if {"-h", "--help"} & set(argv):
        print(parser.description)
    a, rest = parser.parse_known_args([x for x in argv if x not in ("-h", "--help")])
    o = parse([*rest, *({"-h", "--help"} & set(argv))], world)
    if not o.links or world == 1 or int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
        # they share a clock
        raise BadInput("tools.emulate needs --links FILE and several processes, all on one machine")
    if not 1e-6 <= a.time_scale < math.inf:
        raise BadInput(f"--time-scale must be at least 1e-06, got {a.time_scale}")
    o.device, o.backend = "cpu", "gloo"
    return vars(o), a.time_scale


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


class EmulatedPipeline(Pipeline):
    """A note goes ahead of each message: when it is to arrive, on the clock that all processes share."""

    def follow(self, network, scale):
        self.network, self.scale = network, scale
        self.usable, self.notes, self.runs = 0.0, [], 0

    def run(self, paths, batches, train=True, order=None):
        if train:
            self.runs += 1
            self.job.share(f"run/{self.runs}", "")          # all begin together: the time is this run's own
        found = super().run(paths, batches, train, order)
        while self.notes:
            work, _, peer = self.notes.pop()
            self.wait(work, peer)
        return found

    def take(self, u, hop):
        x = super().take(u, hop)
        if self.train:
            source = self.chains[u][hop - 1] if hop else self.rank
            if source != self.rank:
                sleep_until(self.note(source, u, hop))
            sleep_until(self.usable)
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
            self.notes.append(self.message(torch.tensor([arrival], dtype=torch.float64), to, u, hop))
        return super().send(tensor, to, u, hop)

    def message(self, note, to, u, hop):
        return torch.distributed.isend(note, to, tag=tag(u, hop) + NOTE), note, to

    def note(self, source, u, hop):
        note = torch.empty(1, dtype=torch.float64)
        torch.distributed.recv(note, source, tag=tag(u, hop) + NOTE)
        return note.item()


class TimedEmulation(Timed, EmulatedPipeline):
    """For --replan."""


if __name__ == "__main__":
    main()
