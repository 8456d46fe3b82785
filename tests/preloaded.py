"""What processes of tests are forked with: our package, and Numba ready to load kernels. Each saves 1.3 s by it.

What only the command line needs is not here: `python -m viviane.cli.main` must find it as in a fresh interpreter.
"""

import importlib

import numba

MODULES = [
    *("torch._dynamo", "torch.distributed", "viviane.data.synthetic", "viviane.etl", "viviane.model", "viviane.zoo"),
    *("viviane.training", "viviane.ops.embedding_bag.cpu", "viviane.ops.hash_table.cpu", "viviane.ops.row_update.cpu"),
]

for name in MODULES:
    importlib.import_module(name)
numba.njit(lambda number: number + 1)(1)  # what the first function compiled makes, later ones and kernels use
