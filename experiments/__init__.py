"""The papers' results at the size of this machine, one file per headline, and what serves them."""
