"""What wraps an outer optimizer is used in its place: this passes on what a trainer uses."""


class Around:
    """Subclasses have `step`, and whatever else they change."""

    def __init__(self, outer):
        self.outer = outer

    @property
    def steps(self):
        return self.outer.steps

    @steps.setter
    def steps(self, steps):
        self.outer.steps = steps

    @property
    def inner_steps(self):
        return self.outer.inner_steps

    @inner_steps.setter
    def inner_steps(self, inner_steps):
        self.outer.inner_steps = inner_steps

    @property
    def bytes_sent(self):
        return self.outer.bytes_sent

    def due(self):
        """Whether a message departs at the end of the present inner step."""
        return self.outer.due()

    def settle(self):
        self.outer.settle()

    def state_dict(self):
        return self.outer.state_dict()

    def load_state_dict(self, state):
        self.outer.load_state_dict(state)
