"""From keys to rows on a GPU, equal to the plain truth in every number."""

from itertools import accumulate

import pytest
import torch

from viviane.ops.key_rows import HASH, RAISE, REPLACE, SKIP, ColumnRule, KeyRules, gpu, lasting_record, reference

NULL = 5000
RULES = [
    ColumnRule(base=0, num_rows=10, policy=RAISE),
    ColumnRule(base=10, num_rows=1, policy=HASH),
    ColumnRule(base=11, num_rows=7, policy=HASH, padding=3),
    ColumnRule(base=20, num_rows=2, policy=HASH, padding=1),
    ColumnRule(base=30, num_rows=100, policy=REPLACE, replacement=33, padding=0),
    ColumnRule(base=200, num_rows=9, policy=SKIP),
    ColumnRule(base=300, num_rows=5, policy=RAISE, padding=0),
]
EDGES = {torch.int32: (-(2**31), 2**31 - 1), torch.int64: (-(2**63), 2**63 - 1)}


def both(keys, rules, columns=None):
    made = KeyRules(rules, NULL, keys.device)
    found, truth = gpu.key_rows(keys, made, columns), reference.key_rows(keys, made, columns)
    assert found[0].dtype == truth[0].dtype
    assert torch.equal(found[0], truth[0])
    assert found[1].tolist() == truth[1].tolist()
    return found


def keys_of(size, rules, dtype, wild, device):
    generator = torch.Generator().manual_seed(size)
    keys = torch.stack([torch.randint(rule.num_rows, (size,), generator=generator, dtype=dtype) for rule in rules], 1)
    if wild:
        strange = torch.tensor([*EDGES[dtype], -1, 10, 11], dtype=dtype)
        where = torch.rand(keys.shape, generator=generator) < 0.2
        keys[where] = strange[torch.randint(5, (int(where.sum()),), generator=generator)]
    return keys.to(device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 3, 300])
@pytest.mark.parametrize("wild", [False, True])
def test_every_policy(device, dtype, size, wild):
    both(keys_of(size, RULES, dtype, wild, device), RULES)


def test_the_first_offender_is_reported_whatever_the_order_of_the_programs(device):
    keys = torch.zeros(5000, len(RULES), dtype=torch.int64, device=device)
    keys[4999, 0], keys[700, 6], keys[700, 0], keys[3, 5] = -1, 5, 12, 99
    _, record = both(keys, RULES)
    assert record.tolist() == [1, 700 * len(RULES), 12]


def test_a_lasting_record_keeps_the_first_offender_until_it_is_emptied(device):
    rules, kept = KeyRules(RULES[:1] * 2, NULL, device), lasting_record(device)
    calls = [torch.zeros(9, 2, dtype=torch.int64, device=device) for _ in range(4)]
    calls[1][4, 1], calls[1][6, 0], calls[2][0, 0] = 77, 88, 99
    for keys in calls:
        gpu.key_rows(keys, rules, None, kept)
    assert kept.tolist()[:3] == [1, 9, 77]
    kept[:3] = 0
    for keys in (calls[0], calls[2]):
        gpu.key_rows(keys, rules, None, kept)
    assert kept.tolist()[:3] == [1, 0, 99]


def test_columns_strides_and_more_columns_than_a_tile(device):
    many = [RULES[i % len(RULES)] for i in range(70)]
    keys = keys_of(9, many, torch.int64, True, device)
    both(keys, many)
    both(keys.t().contiguous().t(), many)
    picked = torch.tensor([69, 0, 35], device=device)
    both(keys, [many[i] for i in picked.tolist()], picked)


def test_no_keys_and_no_columns(device):
    both(torch.zeros(0, len(RULES), dtype=torch.int32, device=device), RULES)
    both(torch.zeros(4, 0, dtype=torch.int32, device=device), [])


def test_rows_past_two_to_the_31(device):
    rules = KeyRules([ColumnRule(base=2**33, num_rows=2**34, policy=RAISE)], 2**35, device)
    keys = torch.tensor([[0], [2**34 - 1]], device=device)
    rows, record = gpu.key_rows(keys, rules)
    assert rows.tolist() == [[2**33], [2**33 + 2**34 - 1]]
    assert record.tolist() == [0, 0, 0]


def bags_of(lengths, rule, dtype, seed, device, wild=True):
    """Return keys and offsets of one feature's bags."""
    keys = keys_of(sum(lengths) + seed, [rule], dtype, wild, device)[seed:, 0]
    return keys, torch.tensor([0, *accumulate(lengths)], device=device)


def both_bags(features, rules):
    keys, offsets = [one for one, _ in features], [one for _, one in features]
    made = KeyRules(rules, NULL, keys[0].device)
    found, truth = gpu.bag_rows(keys, offsets, made), reference.bag_rows(keys, offsets, made)
    for own, other in zip(found, truth, strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)
    return found


@pytest.mark.parametrize("wild", [False, True])
def test_bags_of_every_policy(device, wild):
    lengths = [[3, 0, 1], [0, 0, 0], [1, 1, 1], [2500, 0, 7], [0, 0, 2048], [0, 4096, 0], [0, 0, 1]]
    kinds = [torch.int64, torch.int32, torch.int32, torch.int64, torch.int64, torch.int32, torch.int64]
    features = [
        bags_of(own, rule, kind, i, device, wild)
        for i, (own, rule, kind) in enumerate(zip(lengths, RULES, kinds, strict=True))
    ]
    both_bags(features, RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_key_out_of_range_in_the_second_of_three_bags(device, rule):
    features = [bags_of([2, 1], one, torch.int64, i, device, False) for i, one in enumerate([RULES[0], rule, RULES[6]])]
    features[1][0][1] = 10**12
    _, _, record = both_bags(features, [RULES[0], rule, RULES[6]])
    assert record.tolist() == ([1, 4, 10**12] if rule.policy == RAISE else [0, 0, 0])


def test_bags_of_one_row_and_without_any_keys(device):
    both_bags([bags_of([0], rule, torch.int64, 0, device) for rule in RULES], RULES)
    both_bags([bags_of([], rule, torch.int64, 0, device) for rule in RULES[:3]], RULES[:3])
    both_bags([bags_of([1], RULES[0], torch.int32, 0, device)], RULES[:1])
    both_bags([bags_of([5000], rule, torch.int32, i, device) for i, rule in enumerate(RULES[:2])], RULES[:2])


def test_one_key_a_hundred_thousand_times_beside_many_small_features(device):
    rules = [RULES[i % len(RULES)] for i in range(14)]
    features = [bags_of([i % 3, 1], rule, torch.int64, i, device) for i, rule in enumerate(rules)]
    features[9] = torch.full((100_000,), 4, device=device), torch.tensor([0, 99_999, 100_000], device=device)
    both_bags(features, rules)


def test_bags_whose_keys_lie_anywhere(device):
    whole = torch.arange(40, device=device) % 7
    features = [(whole[i : 2 * i + 3], torch.tensor([0, i + 3], dtype=torch.int32, device=device)) for i in range(5)]
    both_bags(features, RULES[2:7])


def test_a_lasting_record_of_bags_keeps_the_first_offender(device):
    rules, kept = KeyRules([RULES[0], RULES[5], RULES[6]], NULL, device), lasting_record(device)
    offsets = [torch.tensor([0, 2], device=device)] * 3
    calls = [[torch.ones(2, dtype=torch.int64, device=device) for _ in range(3)] for _ in range(4)]
    calls[1][2][1], calls[1][1][0], calls[2][0][0] = 77, 88, 99
    for keys in calls:
        gpu.bag_rows(keys, offsets, rules, kept)
    assert kept.tolist()[:3] == [1, 5, 77]
    kept[:3] = 0
    for keys in (calls[0], calls[2]):
        gpu.bag_rows(keys, offsets, rules, kept)
    assert kept.tolist()[:3] == [1, 0, 99]
