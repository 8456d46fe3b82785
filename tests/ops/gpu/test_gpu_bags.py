"""Collections with many bags on a GPU: rows, messages, and where gradients stand, as the CPU has them."""

import pytest
import torch

from viviane.batch import Bag
from viviane.config import SGD, AdaGrad
from viviane.core.errors import KeyRangeError
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.keys import BagKeyOutOfRange
from viviane.embedding.storage import Storage
from viviane.ops.dispatch import use_implementation

ON_GPU = torch.cuda.is_available()
POLICIES = ["raise", "default", "hash", "ignore"]
FEW_BAGS = 6
"""One of every kind that `build` and `keys_for` make: all policies, a mean, weights, no keys, one key at most."""


def build(device, num_bags=13, dim=4, singles=2, policy=None, rule=None):
    """A storage of tables with all policies, bags of all kinds, and features with one id a row."""
    tables = [
        TableConfig(
            name=f"t{i}", num_rows=7 + i, dim=dim, out_of_range=policy or POLICIES[i % 4],
            padding_id=2 if i % 3 == 1 else None,
        )
        for i in range(6)
    ]  # fmt: skip
    features = [
        FeatureConfig(name=f"bag{i}", table=f"t{i % 6}", combiner="mean" if i % 5 == 4 else "sum")
        for i in range(num_bags)
    ]
    features += [FeatureConfig(name=f"one{i}", table=f"t{i}") for i in range(singles)]
    return EmbeddingCollection(tables, features, rule or AdaGrad(), seed=3, device=device)


def keys_for(emb, size, device, seed=0, wild=False, longest=4, weighted=False):
    generator = torch.Generator().manual_seed(seed)
    keys = {}
    for i, (name, feature) in enumerate(emb.features.items()):
        table = emb.tables[feature.table]
        high = table.num_rows + (3 if wild and table.out_of_range != "raise" else 0)
        kind = torch.int32 if i % 2 else torch.int64
        if name.startswith("one"):
            keys[name] = torch.randint(table.num_rows, (size,), generator=generator).to(device)
            continue
        most = 0 if i == 3 else 1 if i % 4 == 1 else longest
        lengths = torch.randint(0, most + 1, (size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(high, (int(offsets[-1]),), generator=generator, dtype=kind)
        weights = torch.rand(len(values), generator=generator).to(device) if weighted and i % 3 == 0 else None
        keys[name] = Bag(values.to(device), offsets.to(device), weights)
    return keys


def joined(emb):
    (storage,) = emb.all_storages()
    return storage._joined()


def gradient_of(out, apart):
    """A gradient of an output, as columns of a wider one where its rows are to be farther apart."""
    size, width = out.shape
    whole = torch.randn(size, apart, generator=torch.Generator().manual_seed(size + apart)).to(out.device)
    return whole[:, 1 : width + 1] if apart > width else whole


def assert_alike(one, other):
    """Entries are the same, in the same order."""
    assert torch.equal(one.rows.long(), other.rows.long())
    assert torch.equal(one.sources.long(), other.sources.long())
    assert torch.equal(one.gradients, other.gradients)
    assert one.aligned == other.aligned
    assert (one.weights is None) == (other.weights is None)
    if one.weights is not None:
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 5, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_storage_of_many_bags(device, size, weighted):
    found = []
    for way in ("gpu", "reference"):
        emb = build(device)
        with use_implementation(way):
            out = emb(keys_for(emb, size, device, seed=size, wild=True, weighted=weighted))
            emb.check()
            out.flat.backward(gradient_of(out.flat, emb.width))
            found.append((out.flat.detach(), joined(emb)))
            emb.step(0.1)
            found[-1] += (torch.cat([emb.export_table(name).weight for name in emb.tables]),)
    (out, entries, rows), (plain_out, plain, plain_rows) = found
    torch.testing.assert_close(out, plain_out, rtol=1e-5, atol=1e-5)
    assert_alike(entries, plain)
    assert entries.sources.dtype == torch.int32
    torch.testing.assert_close(rows, plain_rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("singles", [0, 2] if ON_GPU else [2])
def test_rows_of_gradients_may_lie_farther_apart_from_step_to_step(device, singles, monkeypatch):
    """The place of gradients is made in forward for what came last, and again if that was wrong: the same bits."""
    weights = []
    for prepares in (True, False):
        if not prepares:
            monkeypatch.setattr(Storage, "prepare", lambda *given: None)
        emb, plain = build(device, FEW_BAGS, singles=singles), build(device, FEW_BAGS, singles=singles)
        (storage,) = emb.all_storages()
        width, guessed = emb.width, []
        wide, wider = width + 8, width + 3
        for step, (size, apart) in enumerate(
            [(5, width), (5, wide), (7, wide), (1, wider), (6, wide), (5, wider), (4, width), (1, width)]
        ):
            keys = keys_for(emb, size, device, seed=step)
            with use_implementation("gpu"):
                out = emb(keys)
                guessed.append(None if storage._prepared is None else storage._prepared.apart)
                out.flat.backward(gradient_of(out.flat, apart))
                entries = joined(emb)
                if prepares:
                    assert entries.sources is storage._prepared.sources
                    assert entries.rows is storage._prepared.rows
                emb.step(0.1)
            with use_implementation("reference"):
                out = plain(keys)
                out.flat.backward(gradient_of(out.flat, apart))
                assert_alike(entries, joined(plain))
                plain.step(0.1)
        assert guessed == ([width, width, wide, wide, wide, wide, wider, width] if prepares else [None] * 8)
        weights.append(torch.cat([emb.export_table(name).weight for name in emb.tables]))
    assert torch.equal(*weights)


def test_passes_that_are_not_those_prepared(device):
    """Two lookups before their backward passes, in either order, and one that goes backward twice."""
    for order in ([0, 1], [1, 0], [0, 0, 1]):
        found = []
        for way in ("gpu", "reference"):
            emb = build(device, FEW_BAGS)
            with use_implementation(way):
                outs = [emb(keys_for(emb, size, device, seed=size)).flat for size in (5, 6)]
                for i in order:
                    outs[i].backward(gradient_of(outs[i], emb.width + 2 * i), retain_graph=True)
                found.append(joined(emb))
                emb.discard_gradients()
                out = emb(keys_for(emb, 3, device)).flat
                out.backward(gradient_of(out, emb.width))
                found.append(joined(emb))
        assert_alike(found[0], found[2])
        assert_alike(found[1], found[3])


@pytest.mark.parametrize("num_bags", [1, 3])
def test_rows_of_a_storage_stand_behind_one_another(device, num_bags, monkeypatch):
    """What is sorted is the list that the lookups read; where they were made apart, as of one bag, it is a copy."""
    emb = build(device, num_bags=num_bags)
    seen = []
    prepare = Storage.prepare

    def listen(storage, parts, size, width):
        prepare(storage, parts, size, width)
        seen.append((parts, storage._prepared.rows))

    monkeypatch.setattr(Storage, "prepare", listen)
    with use_implementation("gpu"):
        emb(keys_for(emb, 5, device)).flat.sum().backward()
        emb.step(lr=0.1)
    [(parts, rows)] = seen
    assert torch.equal(rows, torch.cat([part.rows.reshape(-1) for part in parts]))
    assert (rows.data_ptr() == parts[0].rows.data_ptr()) == (num_bags > 1)


def test_bags_without_any_keys_and_one_key_very_often(device):
    often = 3_000 if ON_GPU else 300  # the interpreter is slow
    for lengths in ({}, {1: [0, 0, often]}, {0: [0, 3, 0], 2: [often, 0, 1]}):
        found = []
        for way in ("gpu", "cpu" if device.type == "cpu" else "reference"):
            emb = build(device, num_bags=3, dim=1, singles=0, rule=SGD())
            keys = {f"bag{i}": Bag.from_lists([[3] * n for n in lengths.get(i, [0, 0, 0])]) for i in range(3)}
            with use_implementation(way):
                out = emb({name: bag.to(device) for name, bag in keys.items()}).flat
                out.backward(torch.ones_like(out))
                found.append((out.detach(), joined(emb)))
                emb.step(2.0**-10)
                found[-1] += (torch.cat([emb.export_table(name).weight for name in emb.tables]),)
        (out, entries, rows), (plain_out, plain, plain_rows) = found
        torch.testing.assert_close(out, plain_out, rtol=1e-3, atol=1e-3)
        assert_alike(entries, plain)
        torch.testing.assert_close(rows, plain_rows, rtol=1e-5, atol=1e-5)


def test_more_features_than_a_launch_takes(device):
    found = []
    for way in ("gpu", "reference"):
        emb = build(device, num_bags=70, dim=2)
        keys = keys_for(emb, 3, device, wild=True)
        with use_implementation(way):
            out = emb(keys).flat
            out.backward(gradient_of(out, emb.width))
            found.append(joined(emb))
            if way == "gpu":
                emb.check()
    assert_alike(*found)
    keys["bag40"] = Bag.from_lists([[], [1], [1, 5, -1]]).to(device)  # of a table with "raise"
    keys["bag64"] = Bag.from_lists([[99], [], []]).to(device)
    emb = build(device, num_bags=70, dim=2, policy="raise")
    keys |= {name: keys_for(emb, 3, device)[name] for name in keys if name not in ("bag40", "bag64")}
    said = pytest.raises(KeyRangeError, match=r"feature 'bag40', table 't4', row 2 of the batch\n  value:   -1")
    with use_implementation("gpu"), said:
        looked_up(emb, keys)


def test_lookups_whose_bags_are_kept_for_messages_are_checked_in_time(device, monkeypatch):
    """Until somebody asks, each violation holds its batch's offsets: as many features' as of lookups one by one."""
    emb = build(device, num_bags=5, dim=1, singles=0, policy="ignore")
    found = BagKeyOutOfRange(torch.zeros(3), "", ("a", "b", "c"), (), (), ())
    emb._violations.extend([found] * 80)
    assert emb._violations.num_lookups == 240
    asked = []
    monkeypatch.setattr(emb, "check", lambda: asked.append(emb._violations.clear()))
    with use_implementation("gpu"), torch.no_grad():
        emb(keys_for(emb, 1, device))
        assert not asked
        emb._violations.extend([found] * 6)
        emb(keys_for(emb, 1, device))
    assert len(asked) == 1


def looked_up(emb, keys):
    out = emb(keys).flat.detach()
    emb.check()
    return out


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_key_out_of_range_in_the_second_of_three_bags(device, policy, padded):
    said = []
    for way in ("gpu", "reference"):
        table = TableConfig(name="x", num_rows=4, dim=2, out_of_range=policy, padding_id=1 if padded else None)
        features = [FeatureConfig(name=name, table="x", combiner="mean" if name == "b" else "sum") for name in "abc"]
        emb = EmbeddingCollection([table], features, SGD(), device=device)
        keys = {
            "a": Bag.from_lists([[], [0, 1, 2], []]),
            "b": Bag.from_lists([[1], [], [3, 7, -5]], dtype=torch.int32),
            "c": Bag.from_lists([[9], [], []] if policy != "raise" else [[9], [0], []]),
        }
        with use_implementation(way):
            try:
                said.append(looked_up(emb, {name: bag.to(device) for name, bag in keys.items()}))
            except KeyRangeError as error:
                said.append(str(error))
    if policy == "raise":
        assert said[0] == said[1]
        assert "feature 'b', table 'x', row 2 of the batch\n  value:   7\n" in said[0]
    else:
        torch.testing.assert_close(*said)
