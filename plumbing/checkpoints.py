"""Every rank writes its own part, whole or not at all. A run resumes from a step that all ranks hold.

    runs/NAME/checkpoints/00000600/rank3.pt       rank 3's part of step 600
    runs/NAME/checkpoints/00000600/rank2.dead     rank 2 was dead: any replica's part will do for it
"""
import contextlib
import sys
import time
from pathlib import Path

import torch

from plumbing.processes import BadInput, forbid, one_line, restarts
from plumbing.report import Log, Meter, atomic

FORM = 4        # the version of what is saved; other versions are refused


class Checkpoints:
    """This rank's parts, in a folder that is this machine's own or one for all machines."""

    def __init__(self, job, folder):
        self.job, self.rank, self.folder = job, job.rank, folder / "checkpoints"

    def place(self, step):
        return self.folder / f"{step:08d}"

    def parts(self, rank, replicas=()):
        """{step: file} of a rank's parts here, in order. If the rank was dead, one of its replicas' parts."""
        found = {}
        for place in sorted(self.folder.glob("[0-9]" * 8)):
            ranks = [*replicas, rank] if (place / f"rank{rank}.dead").exists() else [rank]
            found.update({int(place.name): file for r in ranks if (file := place / f"rank{r}.pt").exists()})
        return found

    # ---- writing

    def save(self, step, state):
        """Write this rank's part. Raises BadInput without room, or without leave, to write."""
        place = self.place(step)
        try:
            place.mkdir(parents=True, exist_ok=True)
            with atomic(place / f"rank{self.rank}.pt") as file:
                torch.save(dict(state, form=FORM), file)
        except (OSError, RuntimeError) as error:
            told = error if isinstance(error, OSError) else error.__context__       # torch hides a full disk
            raise BadInput(f"cannot write the checkpoint {place}: {one_line(told or error)}")
        self.seal()

    def seal(self):
        """Tell that this rank has written its part, and drop the parts that nobody needs. No rank waits.

        This rank keeps its last two parts, its part of the newest checkpoint that all ranks hold, and all
        from the newest on that all living ranks hold. The first rank marks the dead where they have no part.
        """
        store, gone, held = self.job.store, self.job.gone(), list(self.parts(self.rank))
        store.set(f"saved/{held[-1]}/{self.rank}", "=")         # a store may refuse an empty value
        for step in held:
            for r in gone if self.job.leads else ():
                if not store.check([f"saved/{step}/{r}"]):
                    (self.place(step) / f"rank{r}.dead").touch()
        of_all, of_living = (max((step for step in held if self.saved(step, without)), default=0)
                             for without in ((), gone))
        self.forget({step for step in held[:-2] if step < of_living} - {of_all})

    def saved(self, step, without):
        """Whether all ranks but these have written their parts of a step."""
        return self.job.store.check([f"saved/{step}/{r}" for r in range(self.job.world) if r not in without])

    def forget(self, steps):
        """Remove this rank's parts of these steps, and the marks of the dead: the rest serves no rank."""
        for step in steps:
            place = self.place(step)
            for file in [*place.glob(f"rank{self.rank}.*"), *place.glob("rank*.dead")]:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):          # the last rank to leave takes the folder
                place.rmdir()

    # ---- reading

    def newest(self, replicas):
        """(state, steps): this rank's part of the newest checkpoint of which every rank holds a sound part
        (None after a restart: there is none), and the steps of this rank's newer parts, which training
        passes again. Raises BadInput where a run without such a checkpoint cannot begin anew.
        """
        held, sound, damaged = self.parts(self.rank, replicas), {}, []
        for step, file in held.items():
            try:
                sound[step] = load(file)
            except BadInput as error:
                damaged.append(str(error))
        step, lacking = self.whole(dict(enumerate(self.job.share("sound", list(sound)))))
        damaged = sum(self.job.share("damaged", damaged), [])
        if step >= 0:
            self.job.say(f"warning: {why}; step {step} is taken" for why in damaged + lacking)
            self.job.store.set(f"saved/{step}/{self.rank}", "=")
        elif damaged or not restarts():
            nothing = f"{self.folder.parent} has no checkpoint that all {self.job.world} ranks hold"
            raise BadInput(", and ".join([*damaged[-1:], nothing]))
        return sound.get(step), [other for other in held if other > step]

    def whole(self, held):
        """(the newest step of which all ranks hold a part, or -1; [what a newer one lacks] or []).

        held: {rank: the steps of which it holds a part}.
        """
        step = max(set.intersection(*map(set, held.values())), default=-1)
        newest = max(set().union(*held.values()), default=-1)
        lacking = [str(rank) for rank, steps in held.items() if newest not in steps]
        return step, [f"{self.place(newest)} lacks the part of rank {', '.join(lacking)}"] if lacking else []


def load(file):
    """A part, mapped into memory. Raises BadInput if it is damaged or of another version."""
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise BadInput(f"{file} is damaged ({one_line(error)[:100]})")
    if not isinstance(state, dict) or state.get("form") != FORM:
        raise BadInput(f"{file} was written by another version of this program")
    return state


# ---- a run (a train.Run) in a checkpoint, and back


def state_of(run):
    return dict(step=run.step, cursor=run.cursor, theta=run.theta, inner=run.inner.state_dict(),
                outer=run.outer and run.outer.state_dict(), owed=run.average and run.average.owed,
                plan=run.routes.plan, rho=run.rho, corpus=run.corpus and run.corpus.digest,
                meter=run.meter.state(run))


def go_on(run):
    """Load the newest checkpoint that all ranks hold; returns its plan. After a restart there may be none."""
    state, run.stale = run.job.together(run.checkpoints.newest, run.stages[run.stage])
    return run.job.together(restore, run, state) if state else None


def restore(run, state):
    """Put what `state_of` returned into the run. Returns its plan. Raises BadInput for other data."""
    if run.corpus and state["corpus"] != run.corpus.digest:
        raise BadInput(f"the data differ from those of {run.folder} (corpus {run.corpus.digest}, then "
                       f"{state['corpus']}): give the same --data or start a new run")
    run.step, run.rho = state["step"], rho_of(run.o, state)
    run.theta.copy_(state["theta"])
    run.inner.load_state_dict(state["inner"])
    run.meter = Meter(**state["meter"])
    if run.outer:
        run.outer.load_state_dict(state["outer"])
    if run.average:
        run.average.owed = state.get("owed") or ()
    if run.reader:
        run.reader.cursor = state["cursor"]
    return state["plan"]


def rho_of(o, state):
    """rho of each stage, as the checkpoint was evaluated; o: the options now, perhaps --unscaled."""
    return not o.unscaled and state.get("rho") or [1.0] * len(o.stages)


def begin(run):
    """The log of a run that begins or resumes. A run that has done all its steps says so, and ends here."""
    if run.step >= run.o.steps and not run.job.joining:
        run.job.say([f"{run.folder} has done all its {run.step} steps: give more --steps to go on"])
        run.job.close()
        sys.exit(0)
    run.job.together(run.checkpoints.forget, run.stale)           # training passes there again
    return run.job.together(Log, run)


def take_folder(o, job):
    """The run's folder, made by rank 0."""
    if not o.resume:
        o.name = job.agree_on("name", lambda: new_folder(o))
    return Path(o.resume or f"runs/{o.name}")


def new_folder(o):
    """The name of a folder in runs/, taken by its config.json. A restarted run finds its folder again."""
    name = o.name or f"{o.method}-{'x'.join(map(str, o.stages))}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = Path("runs", name, "config.json")
    forbid((config.exists() and not restarts(),
            f"{config.parent} exists: go on with --resume {config.parent}, or give another --name"))
    config.parent.mkdir(parents=True, exist_ok=True)
    config.touch(exist_ok=restarts() > 0)       # of two runs that begin at once the second fails here
    return name
