"""A publisher for tests to kill: python killed_publisher.py ADDRESS OUTBOX; goes on where the outbox ends."""

import sys

import numpy as np

from viviane.store.stream import DeltaPublisher


def rows_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and rows of a publication: a function of its number."""
    random = np.random.default_rng(number)
    keys = np.unique(random.integers(0, 500, 60))
    return keys, np.full((len(keys), 4), number, np.float32).view(np.uint8)


if __name__ == "__main__":
    with DeltaPublisher(sys.argv[1], sys.argv[2], "m") as publisher:
        while publisher.outbox.publication < int(sys.argv[3]):
            print(publisher.publish({"t": rows_of(publisher.outbox.publication + 1)}), flush=True)
        publisher.barrier()
