"""Training on one machine as over given links: no message arrives before they say, no task ends.

    torchrun --nproc-per-node 20 -m tools.emulate --links links.json --time-scale 0.1 [as train.py]

It compares an iteration's time with what skippipe.simulate makes of the same network: metrics.jsonl
has both, in the links' seconds.
"""
import os
import time
from dataclasses import dataclass

from planning.replan import TimedBackwards
from planning.training import read_links
from plumbing.options import option, parse_options
from plumbing.processes import BadInput, Job
from skippipe import WORK, kind
from train import Options, Pipeline, ReplanningRoutes, build, train


@dataclass
class Emulation(Options):
    # Of any paths.
    links: str = option(None, "JSON with the ranks' delay and compute in seconds")
    time_scale: float = option(1.0, "seconds of ours per second of the links", least=1e-6)


def main(argv=None):
    job = Job(argv)
    given = job.agree(parse, argv)
    scale, o = given.pop("time_scale"), Options(**given)
    job.connect(o)
    parts = (TimedEmulation, ReplanningRoutes) if o.replan else (EmulatedPipeline,)
    run = build(job, o, *parts)
    run.routes.pace = run.pipeline.scale = scale
    # The file's network, not the plan's: a plan may be for ranks that have become slower.
    run.pipeline.network = job.together(read_links, o.links, run.stages, name="emulated links")
    train(run)


def parse(argv, world):
    o = parse_options(Emulation, argv, world, __doc__)
    one_clock = int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world > 1
    if not (o.links and one_clock):
        raise BadInput("tools.emulate needs --links FILE and several processes, all on one machine")
    o.device, o.backend = "cpu", "gloo"
    return o


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


class EmulatedPipeline(Pipeline):
    """The store has the arrival of each message, in seconds of the clock that all processes share.

    network: a skippipe.Network. scale: seconds of ours per second of the network.
    """
    usable = 0.0        # when the last task's overhead ends
    runs = 0            # that trained

    def run(self, paths, batches, train=True, order=None):
        if train:
            self.runs += 1
            self.job.share(f"run/{self.runs}", "")      # all begin together: the time is this run's
        return super().run(paths, batches, train, order)

    def take(self, u, hop):
        x = super().take(u, hop)
        if self.train:
            earliest = self.usable
            if hop and self.chains[u][hop - 1] != self.rank:            # it came from another rank
                arrival = self.job.store.get(f"arrival/{self.runs}/{u}/{hop}")
                earliest = max(earliest, float(arrival))
            sleep_until(earliest)
        self.start = time.monotonic()
        return x

    def task(self, u, hop, x):
        out = super().task(u, hop, x)
        if self.train:
            seconds = WORK[kind(self.paths[u], hop)] * self.network.compute[self.rank]
            sleep_until(self.start + seconds * self.scale)
            rest = self.network.origin_overhead if hop == 0 else self.network.overhead
            self.usable = time.monotonic() + rest * self.scale
        return out

    def send(self, tensor, to, u, hop):
        if self.train:
            arrival = time.monotonic() + self.network.delay[self.rank][to] * self.scale
            self.job.store.set(f"arrival/{self.runs}/{u}/{hop}", str(arrival))
        return super().send(tensor, to, u, hop)


class TimedEmulation(TimedBackwards, EmulatedPipeline):
    """For --replan."""


if __name__ == "__main__":
    main()
