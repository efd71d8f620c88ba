"""Checkpoints: every rank writes its own part, whole or not at all.

A run resumes from the newest step of which all ranks hold a part.

    runs/NAME/checkpoints/00000600/rank3.pt       rank 3's part of step 600
    runs/NAME/checkpoints/00000600/rank2.dead     rank 2 was dead: any replica's part will do for it
    runs/NAME/lock                                locked while a first rank trains in this folder
"""
import contextlib
import fcntl
import sys
import time
from pathlib import Path

import torch

from plumbing.files import atomic
from plumbing.processes import BadInput, forbid, one_line, restarts
from plumbing.report import Log, Meter

FORM = 4        # the version of what is saved; other versions are refused


class Checkpoints:
    """This rank's parts, in a folder that is this machine's own or one for all machines."""

    def __init__(self, job, folder):
        self.job = job
        self.rank = job.rank
        self.folder = folder / "checkpoints"
        self.lock_file = None

    def place(self, step):
        return self.folder / f"{step:08d}"

    def parts(self, rank, replicas=()):
        """{step: file} of a rank's parts here, in order.

        replicas: the ranks of its stage. Where the rank was dead, a part of one of them stands
        for its own.
        """
        found = {}
        for place in sorted(self.folder.glob("[0-9]" * 8)):
            usable = [rank]
            if (place / f"rank{rank}.dead").exists():
                usable = [*replicas, rank]          # the last that is there counts: best its own
            for r in usable:
                file = place / f"rank{r}.pt"
                if file.exists():
                    found[int(place.name)] = file
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
            cause = error
            if isinstance(error, RuntimeError):         # torch hides a full disk behind one
                cause = error.__context__ or error
            raise BadInput(f"cannot write the checkpoint {place}: {one_line(cause)}")
        self.seal()

    def seal(self):
        """Tell that this rank has written its part, and drop the parts that nobody needs.

        No rank waits. This rank keeps its last two parts, its part of the newest checkpoint that
        all ranks hold, and all from the newest on that all living ranks hold. The first rank
        marks the dead where they have no part.
        """
        held = list(self.parts(self.rank))
        self.tell_of_part(held[-1])
        gone = self.job.gone()
        if self.job.leads:
            self.mark_dead(held, gone)
        everyone = range(self.job.world)
        living = [r for r in everyone if r not in gone]
        of_all = self.newest_saved(held, everyone)
        of_living = self.newest_saved(held, living)
        self.forget([step for step in held[:-2] if step < of_living and step != of_all])

    def tell_of_part(self, step):
        """Tell the other ranks, through the store, that this rank has a part of this step."""
        self.job.store.set(f"saved/{step}/{self.rank}", "=")    # a store may refuse an empty value

    def newest_saved(self, steps, ranks):
        """The newest of these steps of which all these ranks told that they have a part, or 0."""
        newest = 0
        for step in steps:
            if self.job.store.check([f"saved/{step}/{r}" for r in ranks]):
                newest = max(newest, step)
        return newest

    def mark_dead(self, steps, gone):
        """Mark the ranks that are gone, at each of these steps of which they have no part."""
        for step in steps:
            for r in gone:
                if not self.job.store.check([f"saved/{step}/{r}"]):
                    (self.place(step) / f"rank{r}.dead").touch()

    def forget(self, steps):
        """Remove this rank's parts of these steps, and the marks of the dead.

        What is left of them serves no rank.
        """
        for step in steps:
            place = self.place(step)
            for file in [*place.glob(f"rank{self.rank}.*"), *place.glob("rank*.dead")]:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):          # the last rank to leave takes the folder
                place.rmdir()

    def lock(self, takeover=False):
        """Keep other runs out of this run's folder, until `unlock` or the end of this process.

        Raises BadInput if another process has the lock. In a takeover (survive/standby.py) that
        is the process that led before and hangs, or is cut off, and this one goes on.

        A file that says "taken" would outlive a crash. The system's lock ends with the process,
        so a crashed run can resume at once. A folder on NFS has one lock for all machines, since
        Linux asks the server for it. The server frees the lock of a machine that crashed only
        after a while (NFSv4: about 90 s). Some file systems refuse (Lustre without `-o flock`):
        then nothing is locked. Machines without a common folder do not see each other's runs.
        """
        folder = self.folder.parent
        self.lock_file = open(folder / "lock", "w")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            if not takeover:
                raise BadInput(f"another process trains in {folder}: stop it first, or wait for "
                               "its end")
            self.job.say([f"warning: the process that led before still has {folder}/lock"])
        except OSError as error:
            self.unlock()
            self.job.say([f"warning: {folder} cannot be locked against a second run: {error}"])

    def unlock(self):
        """Let other runs have the folder. Nothing where it is not locked."""
        if self.lock_file:
            self.lock_file.close()
            self.lock_file = None

    # ---- reading

    def newest(self, replicas):
        """(state, steps) to resume from; every rank calls this.

        state: this rank's part of the newest checkpoint of which every rank holds a sound part.
        It is None after a restart before the first checkpoint. steps: of this rank's newer parts,
        which training passes again. Raises BadInput where a run without a checkpoint cannot begin
        anew.
        """
        held = self.parts(self.rank, replicas)
        sound = {}
        errors = []
        for step, file in held.items():
            try:
                sound[step] = load(file)
            except BadInput as error:
                errors.append(str(error))
        sound_of_all = self.job.share("sound", list(sound))
        errors_of_all = self.job.share("damaged", errors)
        damaged = [line for lines in errors_of_all for line in lines]
        step, lacking = self.whole(dict(enumerate(sound_of_all)))
        if step >= 0:
            self.job.say(f"warning: {why}; step {step} is taken" for why in damaged + lacking)
            self.tell_of_part(step)
        elif damaged or not restarts():
            lines = damaged[-1:]
            lines.append(f"{self.folder.parent} has no checkpoint that all {self.job.world} ranks "
                         "hold")
            raise BadInput(", and ".join(lines))
        return sound.get(step), [other for other in held if other > step]

    def whole(self, held):
        """(the newest step of which all ranks hold a part, or -1; [what a newer one lacks] or []).

        held: {rank: the steps of which it holds a part}.
        """
        of_each = [set(steps) for steps in held.values()]
        step = max(set.intersection(*of_each), default=-1)
        newest = max(set.union(*of_each), default=-1)
        if step == newest:
            return step, []
        lacking = [str(rank) for rank, steps in held.items() if newest not in steps]
        return step, [f"{self.place(newest)} lacks the part of rank {', '.join(lacking)}"]


def load(file):
    """A part, mapped into memory. Raises BadInput if it is damaged or of another version."""
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:      # damaged bytes make torch raise nearly anything
        raise BadInput(f"{file} is damaged ({one_line(error)[:100]})")
    if not isinstance(state, dict) or state.get("form") != FORM:
        raise BadInput(f"{file} was written by another version of this program")
    return state


# ---- a run (a train.Run) in a checkpoint, and back


def state_of(run):
    """What a rank's part of a checkpoint holds. `steps` shaped the cosine of the learning rate."""
    state = dict(step=run.step, steps=run.o.steps, cursor=run.cursor, theta=run.theta,
                 inner=run.inner.state_dict(), plan=run.routes.plan, rho=run.rho,
                 meter=run.meter.state(run))
    state["outer"] = run.outer and run.outer.state_dict()
    state["owed"] = run.average and run.average.owed
    state["corpus"] = run.corpus and run.corpus.digest
    return state


def go_on(run):
    """Load the newest checkpoint that all ranks hold. Returns its plan.

    Returns None where there is none: a process was restarted before the first checkpoint.
    """
    job = run.job
    state, run.stale = job.together(run.checkpoints.newest, run.stages[run.stage])
    if state is None:
        return None
    plan = job.together(restore, run, state)
    steps = state.get("steps", run.o.steps)         # an older checkpoint does not say
    if steps != run.o.steps:
        job.say([f"warning: --steps {run.o.steps}, and the run had {steps} before: its cosine is "
                 f"stretched, so at step {run.step} the learning rate leaps"])
    return plan


def restore(run, state):
    """Put what `state_of` returned into the run, and return its plan.

    Raises BadInput if the checkpoint is of other data.
    """
    if run.corpus and state["corpus"] != run.corpus.digest:
        raise BadInput(f"the data differ from those of {run.folder} (corpus {run.corpus.digest}, "
                       f"then {state['corpus']}): give the same --data or start a new run")
    run.step = state["step"]
    run.rho = rho_of(run.o, state)
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
    """rho of each stage, as the checkpoint was evaluated.

    o: the options now, perhaps --unscaled.
    """
    if o.unscaled or not state.get("rho"):
        return [1.0] * len(o.stages)
    return state["rho"]


# ---- a run's folder


def take_folder(o, job):
    """The run's folder, made by rank 0."""
    if o.resume:
        return Path(o.resume)
    o.name = job.agree_on("name", lambda: new_folder(o))
    return Path("runs", o.name)


def new_folder(o):
    """The name of a folder in runs/, which this takes by making its config.json.

    A restarted run finds its folder again. Raises BadInput if another run has it.
    """
    stages = "x".join(str(size) for size in o.stages)
    name = o.name or f"{o.method}-{stages}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = Path("runs", name, "config.json")
    forbid((config.exists() and not restarts(),
            f"{config.parent} exists: go on with --resume {config.parent}, or give another --name"))
    config.parent.mkdir(parents=True, exist_ok=True)
    config.touch(exist_ok=restarts() > 0)   # of two runs that begin at once the second fails here
    return name


def begin(run):
    """Lock the folder of a run that begins or resumes, and return its log.

    A run that has done all its steps says so, and ends here. Every rank calls this.
    """
    job = run.job
    if run.step >= run.o.steps and not job.joining:
        job.say([f"{run.folder} has done all its {run.step} steps: give more --steps to go on"])
        job.close()
        sys.exit(0)
    job.together(lock_folder, run)
    job.together(run.checkpoints.forget, run.stale)           # training passes there again
    return job.together(Log, run)


def lock_folder(run):
    """On the first rank, which writes the log: lock the run's folder. Raises BadInput."""
    if run.job.leads:
        run.checkpoints.lock(takeover=run.job.joining)
