"""Tables of one storage that have taken different numbers of steps, and the noise that rounds their rows."""

from dataclasses import replace

import torch

from viviane.config import SGD, Adam
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig


def collection(names, rule, *, dtype="float32", dim=4, seed=3):
    """Tables of 9 rows of ones."""
    tables = [TableConfig(name=name, num_rows=9, dim=dim, dtype=dtype) for name in names]
    made = EmbeddingCollection(tables, [FeatureConfig(name=name, table=name) for name in names], rule, seed=seed)
    for name in names:
        rows = made.export_table(name)
        rows.weight.fill_(1.0)
        made.import_table(name, rows)
    return made


def step(made, names, ids, lr=0.1):
    """Move some tables; the others are frozen meanwhile."""
    frozen = [name for name in made.tables if name not in names]
    for name in frozen:
        made.freeze(name)
    made(dict.fromkeys(made.features, ids)).flat.sum().backward()
    made.step(lr)
    for name in frozen:
        made.unfreeze(name)


def test_tables_of_different_age_take_a_step_as_if_alone():
    """Adam divides by 1 - beta^t of each table's own t; neighbours of one age share a launch, others must not."""
    names, ids = ["a", "b", "c", "d"], torch.tensor([1, 1, 5])
    together = collection(names, Adam())
    alone = {name: collection([name], Adam()) for name in names}
    for moved in (["a"], ["a", "c", "d"], names, ["b", "d"], names):
        step(together, moved, ids)
        for name in moved:
            step(alone[name], [name], ids)
    ages = [together.export_table(name).step for name in names]
    assert ages == [4, 3, 3, 4]
    for name in names:
        ours, truth = together.export_table(name), alone[name].export_table(name)
        assert ours.step == truth.step
        assert torch.equal(ours.weight, truth.weight)
        assert all(torch.equal(ours.state[part], truth.state[part]) for part in truth.state)


def test_a_count_that_was_set_parts_tables_that_moved_together():
    names, ids = ["a", "b"], torch.tensor([1, 1, 5])
    together = collection(names, Adam())
    for _ in range(2):  # the second step finds what the first one planned
        step(together, names, ids)
    together.import_table("b", replace(together.export_table("b"), step=7))
    alone = {name: collection([name], Adam()) for name in names}
    for name in names:
        alone[name].import_table(name, together.export_table(name))
        step(alone[name], [name], ids)
    step(together, names, ids)
    for name in names:
        assert torch.equal(together.export_table(name).weight, alone[name].export_table(name).weight)


def test_every_table_is_rounded_by_noise_of_its_own():
    """Equal rows and gradients far below a bit: what remains is the noise, which tables must not share."""
    ids = torch.arange(9)
    made = collection(["a", "b", "c"], SGD(), dtype="bfloat16", dim=64)
    step(made, ["a", "c"], ids, lr=1e-3)  # b stays between them: two launches
    moved = {name: made.export_table(name).weight for name in ("a", "c")}
    for rows in moved.values():
        # 576 numbers of 1.0 go down by 2^-8 with odds of 1e-3 * 2^8 = 0.256: 147, with a deviation of 10.
        assert 90 < int((rows != 1).sum()) < 200
    both = int(((moved["a"] != 1) & (moved["c"] != 1)).sum())
    assert both < 80  # 38 expected of independent noise, all of a's where the noise is the same


def test_noise_depends_on_the_seed_and_on_the_storages_tables():
    ids = torch.arange(9)

    def rounded(name, **options):
        made = collection([name], SGD(), dtype="bfloat16", dim=64, **options)
        step(made, [name], ids, lr=1e-3)
        return made.export_table(name).weight

    first = rounded("a")
    assert torch.equal(first, rounded("a"))
    assert not torch.equal(first, rounded("b"))
    assert not torch.equal(first, rounded("a", seed=4))
