"""train.py, and each rank says when it begins an iteration: at its second the first step, with its Adam,
is over.

    torchrun --nproc-per-node 8 -m experiments.first_step --stages 4,4 --steps 2
"""
import time

import train


class Telling(train.Pipeline):
    def run(self, *args, **kwargs):
        print(f"at {time.time()} {self.rank}\n", end="", flush=True)
        return super().run(*args, **kwargs)


if __name__ == "__main__":
    train.main(Pipeline=Telling)
