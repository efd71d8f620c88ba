"""Checkpoints: every rank writes its own part, whole or not at all; a run goes on from what all hold.

    runs/NAME/checkpoints/00000600/rank3.pt       rank 3's part of step 600
    runs/NAME/checkpoints/00000600/rank2.dead     rank 2 had died: any replica's part will do for it
"""
import contextlib
import json
import sys
from itertools import count
from pathlib import Path

import torch

from plumbing.options import launch
from plumbing.processes import BadInput, may_restart, one_line, restarts
from plumbing.report import Log, Meter, atomic

FORM = 3        # of what is saved; other forms are refused


class Checkpoints:
    """This rank's parts, in a folder that is this machine's own or one for all."""

    def __init__(self, job, folder):
        self.job, self.rank, self.folder = job, job.rank, folder / "checkpoints"

    def place(self, step):
        return self.folder / f"{step:08d}"

    def steps(self, rank):
        """The steps of which this folder has the rank's part."""
        found = self.folder.glob(f"*/rank{rank}.pt")
        return sorted(int(p.parent.name) for p in found if p.parent.name.isdigit())

    # ---- writing

    def save(self, step, state):
        """Raises BadInput where there is no room, or no leave, to write."""
        place = self.place(step)
        try:
            place.mkdir(parents=True, exist_ok=True)
            with atomic(place / f"rank{self.rank}.pt") as file:
                torch.save(dict(state, form=FORM), file)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                place.rmdir()
            told = error if isinstance(error, OSError) else error.__context__       # torch hides a full disk
            raise BadInput(f"cannot write the checkpoint {place}: {one_line(told or error)}")
        self.seal()

    def seal(self):
        """Tell that this rank has written its part, and drop the parts that nobody needs, without waiting
        for anyone.

        Rank 0 finds the newest step that all have, and the newest that all living have; in newer ones than
        the former it marks who will never write them. Both stay, and all that is newer.
        """
        held = self.steps(self.rank)
        if self.job.world == 1:
            return self.forget(held[:-2])
        store = self.job.store
        store.set(f"saved/{held[-1]}/{self.rank}", "=")
        if self.rank == 0:
            self.mark(store, held)
        whole, sealed = (int(store.get(key)) if store.check([key]) else 0 for key in ("whole", "sealed"))
        self.forget({step for step in held[:-2] if step < sealed} - {whole})

    def mark(self, store, held):
        gone, sealed = self.job.gone(), None
        for step in reversed([step for step in held if store.check([f"saved/{step}/0"])]):      # by this job
            missing = {r for r in range(self.job.world) if not store.check([f"saved/{step}/{r}"])}
            for r in missing & gone:
                (self.place(step) / f"rank{r}.dead").touch()
            if sealed is None and missing <= gone:
                sealed = step
                store.set("sealed", str(step))
            if not missing:
                store.set("whole", str(step))
                break

    def forget(self, steps):
        """Remove this rank's part of these."""
        for step in steps:
            place = self.place(step)
            marks = place.glob("rank*.dead") if self.rank == 0 else []
            for file in [place / f"rank{self.rank}.pt", place / f"rank{self.rank}.tmp", *marks]:
                file.unlink(missing_ok=True)
            if self.job.world > 1:
                self.job.store.delete_key(f"saved/{step}/{self.rank}")
            with contextlib.suppress(OSError):          # the last rank to leave takes the folder
                place.rmdir()

    # ---- reading

    def parts(self, rank, replicas):
        """{step: file} of a rank's parts. A rank that was dead then has the part of any of its replicas."""
        marks = self.folder.glob(f"*/rank{rank}.dead")
        held = {int(mark.parent.name): file for mark in marks for r in replicas
                if (file := mark.with_name(f"rank{r}.pt")).exists()}
        return held | {step: self.place(step) / f"rank{rank}.pt" for step in self.steps(rank)}

    def newest(self, replicas):
        """(state, steps): this rank's part of the newest checkpoint of which every rank holds a sound one
        (None: there is none), and the steps of its newer parts. Training passes those again.
        """
        held = self.parts(self.rank, replicas)
        sound, problem, damaged = dict(held), True, []
        while problem:
            told = self.job.share(f"checkpoints/{len(damaged)}", json.dumps(list(sound)))
            step, lacking = self.whole(dict(enumerate(map(json.loads, told))))
            state, problem = None, ""
            try:
                state = sound.get(step) and load(sound[step])
            except BadInput as error:
                problem = str(error)
            problem = next(filter(None, self.job.share(f"damaged/{len(damaged)}", problem)), "")
            if problem:
                damaged.append(problem)
                sound.pop(step)
        if state:
            self.job.say(f"warning: {why}; step {step} is taken instead" for why in damaged + lacking)
            if self.job.world > 1:
                self.job.store.set("whole", str(step))
        elif damaged:
            raise BadInput(f"{damaged[0]}, and {self.folder} has no other that all ranks hold")
        return state, [other for other in held if other > step]

    def whole(self, held):
        """(the newest step of which all ranks hold a part, or -1; [what a newer one lacks] or []).

        held: {rank: the steps of which it holds a part}.
        """
        step = max(set.intersection(*map(set, held.values())), default=-1)
        newest = max(set().union(*held.values()), default=-1)
        lacking = [str(rank) for rank, steps in held.items() if newest not in steps]
        return step, [f"{self.place(newest)} lacks the part of rank {', '.join(lacking)}"] if lacking else []


def load(file):
    """A part, mapped into memory. Raises BadInput when it is damaged or of another form."""
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise BadInput(f"{file} is damaged ({one_line(error)[:100]})")
    if not isinstance(state, dict) or state.get("form") != FORM:
        raise BadInput(f"{file} was written by another version of this program")
    return state


# ---- a run (a train.Run) in a checkpoint, and back


def state_of(run):
    return dict(step=run.step, cursor=run.cursor, theta=run.theta, adam=run.inner.state_dict(),
                outer=run.outer and run.outer.state_dict(), rng=torch.get_rng_state(), plan=run.routes.plan,
                rho=run.rho, corpus=run.corpus and run.corpus.digest,
                meter=run.meter.state(run))


def go_on(run):
    """Load the newest checkpoint that all ranks hold; returns its plan. After a restart there may be none."""
    state, run.stale = run.job.together(run.checkpoints.newest, run.stages[run.stage])
    run.job.together(fits, run, state)
    if not state:
        return None
    run.step, run.rho = state["step"], rho_of(run.o, state)
    run.theta.copy_(state["theta"])
    run.inner.load_state_dict(state["adam"])
    run.meter = Meter(**state["meter"])
    torch.set_rng_state(state["rng"].cpu())
    if run.outer:
        run.outer.load_state_dict(state["outer"])
    if run.reader:
        run.reader.cursor = state["cursor"]
    return state["plan"]


def rho_of(o, state):
    """rho of each stage, as the checkpoint was evaluated; o: the options now, perhaps --unscaled."""
    return not o.unscaled and state.get("rho") or [1.0] * len(o.stages)


def begin(run):
    """The log of a run that begins or goes on. One that has done all its steps says so, and ends here."""
    if run.step == run.o.steps and not run.job.joining:
        run.job.say([f"{run.folder} has done all its {run.step} steps: give more --steps to go on"])
        with contextlib.suppress(RuntimeError):
            run.job.close()
        sys.exit(0)
    run.job.together(run.checkpoints.forget, run.stale)           # training passes there again
    return run.job.together(Log, run)


def fits(run, state):
    if not state and not restarts():
        raise BadInput(f"{run.folder} has no checkpoint that all {run.job.world} ranks hold")
    if state and state["step"] > run.o.steps:
        raise BadInput(f"--steps {run.o.steps}: {run.folder} has done {state['step']} already; give more")
    if state and run.corpus and state["corpus"] != run.corpus.digest:
        raise BadInput(f"the data differ from those of {run.folder} (corpus {run.corpus.digest}, then "
                       f"{state['corpus']}): give the same --data or start a new run")


def take_folder(o, job):
    """The run's folder, made by rank 0."""
    if o.resume:
        return Path(o.resume)
    o.name = job.agree_on("name", lambda: new_folder(o))
    return Path("runs") / o.name


def new_folder(o):
    """Of several runs that start at once without a name each gets one; of those with one name, the first."""
    name = o.name or f"{o.method}-{'x'.join(map(str, o.stages))}-{launch()}"
    for folder in (Path("runs", name if n == 1 else f"{name}-{n}") for n in count(1)):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            restarts() or open(folder / "config.json", "x").close()
            return folder.name
        except FileExistsError:
            if o.name or may_restart():          # it must find it again
                raise BadInput(f"{folder} exists: go on with --resume {folder}, or give another --name")
