"""Dynamic tables on a GPU against those on the CPU: the same calls, the same rows, keys, scores and evictions."""

import pytest
import torch

from viviane.config import SGD, Adam
from viviane.core.errors import ConfigError, DataError
from viviane.embedding.dynamic import DynamicTable
from viviane.embedding.dynamic_config import DynamicTableConfig
from viviane.ops.dispatch import use_implementation
from viviane.ops.hash_table import TableFullError

EDGES = torch.tensor([-(2**63), 2**63 - 1, 0, 1, -1])
STEPS = 300 if torch.cuda.is_available() else 10
MEMORIES = ["device", "host", "split"] if torch.cuda.is_available() else ["device"]


class Both:
    """One table on the GPU, or in the interpreter, and one on the CPU."""

    def __init__(self, device, optimizer=None, **options):
        options = {"name": "t", "dim": 5, "init": "uniform", "initial_capacity": 4, **options}
        placed = {name: options.pop(name) for name in ("memory", "device_rows") if name in options}
        self.device = device
        with use_implementation("gpu"):
            self.fast = DynamicTable(DynamicTableConfig(**options, **placed), optimizer or SGD(), device=device, seed=3)
        self.true = DynamicTable(DynamicTableConfig(**options), optimizer or SGD(), seed=3)

    def call(self, name, *arguments, **options):
        placed = [one.to(self.device) if isinstance(one, torch.Tensor) else one for one in arguments]
        others = {key: one.to(self.device) if isinstance(one, torch.Tensor) else one for key, one in options.items()}
        with use_implementation("gpu"):
            own = getattr(self.fast, name)(*placed, **others)
        true = getattr(self.true, name)(*arguments, **options)
        for one, other in zip(*((part if isinstance(part, tuple) else (part,)) for part in (own, true)), strict=True):
            if isinstance(one, torch.Tensor) and one.dtype.is_floating_point:
                torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-6)
            elif isinstance(one, torch.Tensor):
                assert torch.equal(one.cpu(), other), name
            else:
                assert one == other, name
        return own

    def train(self, keys, generator):
        self.call("rows", keys)
        gradient = torch.randn(len(keys) * self.true.table.dim, generator=generator)
        for table, device, choice in ((self.fast, self.device, "gpu"), (self.true, "cpu", "auto")):
            with use_implementation(choice):
                table.keep_gradient(table.index.find(keys.to(device)), gradient.to(device))
                table.step(0.1)

    def check(self):
        with use_implementation("gpu"):
            own, saved = self.fast.export(), self.fast.state_dict()
        true, other = self.true.export(), self.true.state_dict()
        for name in ("keys", "scores", "clocks"):
            assert torch.equal(getattr(own, name).cpu(), getattr(true, name)), name
        # Sums of equal rows are rounded in another order, and roots are the GPU's quick ones.
        torch.testing.assert_close(own.weight.cpu(), true.weight, rtol=1e-5, atol=1e-5)
        for name in own.state:
            torch.testing.assert_close(own.state[name].cpu(), true.state[name], rtol=1e-5, atol=1e-5)
        for name in ("rows", "free", "stamps", "counters"):
            assert torch.equal(saved[name].cpu(), other[name]), name
        assert saved["rows"].unique().numel() == len(saved["rows"]) == len(saved["keys"].unique())


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("eviction", "capacity"), [("lru", None), ("lru", 90), ("lfu", 90), ("epoch_lfu", 90)])
def test_random_calls(eviction, capacity, memory, device):
    generator = torch.Generator().manual_seed(5)
    placed = {"memory": memory, **({"device_rows": 20} if memory == "split" else {})}
    both = Both(
        device, Adam(), eviction=eviction, max_capacity=capacity, when_full="raise" if capacity is None else "evict",
        **placed,
    )  # fmt: skip
    for n in range(STEPS):
        keys = torch.randint(-70, 70, (int(torch.randint(0, 40, (), generator=generator)),), generator=generator)
        keys = torch.cat([keys, EDGES, keys[:3]])
        values = torch.randn(len(keys), 5, generator=generator)
        kind = int(torch.randint(0, 7, (), generator=generator))
        if kind == 0:
            both.call("insert_or_assign", keys, values)
        elif kind == 1:
            both.call("assign", keys, values)
        elif kind == 2:
            both.call("erase", keys[::2])
        elif kind == 3:
            both.call("accumulate", keys, values)
        elif kind == 4:
            both.call("find_or_insert", keys)
        else:
            both.train(keys, generator)
        both.call("find", keys)
        both.call("find", keys[:-8].to(torch.int32))
        if eviction == "epoch_lfu" and n % 9 == 0:
            both.call("next_epoch")
        if n % 5 == 4:
            both.check()
    both.check()


@pytest.mark.parametrize("admission", [
    {"type": "count", "count": 2, "max_pending": 20}, {"type": "probability", "probability": 0.5},
    {"type": "filter", "count": 2, "width": 64},
])  # fmt: skip
def test_admission_padding_and_initial_values(admission, device):
    generator = torch.Generator().manual_seed(6)
    both = Both(device, admission=admission, padding_id=7, absent="initial", max_capacity=60, when_full="evict")
    for _ in range(5):
        keys = torch.randint(-40, 40, (30,), generator=generator)
        both.train(keys, generator)
        both.call("find", keys)
        both.check()
    with pytest.raises(DataError, match="padding"):
        both.call("find_or_insert", torch.tensor([7]))


def test_custom_scores(device):
    generator = torch.Generator().manual_seed(7)
    both = Both(device, eviction="custom", max_capacity=40, when_full="evict")
    for _ in range(6):
        keys = torch.randint(-40, 40, (25,), generator=generator)
        both.call("find_or_insert", keys, torch.randint(-9, 9, (25,), generator=generator))
        both.check()


def test_forward_backward_and_evaluation(device):
    generator = torch.Generator().manual_seed(8)
    both = Both(device, padding_id=2, max_capacity=500)
    for _ in range(4):
        keys = torch.randint(-40, 40, (9, 4), generator=generator)
        target = torch.randn(9, 4, 5, generator=generator)
        for table, place, choice in ((both.fast, device, "gpu"), (both.true, "cpu", "auto")):
            with use_implementation(choice):
                (table(keys.to(place)) - target.to(place)).square().sum().backward()
                table.step(0.05)
        both.check()
    both.fast.eval()
    both.true.eval()
    both.call("forward", torch.tensor([[1, 2], [999, -3]]))
    both.call("find", torch.zeros(0, dtype=torch.int64))


def test_a_full_table_raises_and_changes_nothing(device):
    both = Both(device, max_capacity=4)
    both.call("find_or_insert", torch.tensor([1, 2, 3]))
    with use_implementation("gpu"), pytest.raises(TableFullError, match="the table is full"):
        both.fast.find_or_insert(torch.tensor([3, 4, 5], device=device))
    with pytest.raises(TableFullError):
        both.true.find_or_insert(torch.tensor([3, 4, 5]))
    both.call("find_or_insert", torch.tensor([4, 4, 4, 1]))
    both.check()


def test_content_goes_between_devices(device):
    both = Both(device, Adam())
    both.train(torch.arange(-30, 30), torch.Generator().manual_seed(1))
    copy = Both(device, Adam())
    copy.true.load_state_dict({name: part.cpu() for name, part in both.fast.state_dict().items()})
    with use_implementation("gpu"):
        copy.fast.load_state_dict(both.true.state_dict())
    copy.check()
    other = Both(device, Adam())
    with use_implementation("gpu"):
        other.fast.import_(both.true.export())
    other.true.import_(both.true.export())
    other.check()


def test_one_key_very_often(device):
    count = 100_000 if torch.cuda.is_available() else 500
    both = Both(device, dim=1, eviction="lfu", max_capacity=8, when_full="evict")
    for key in (0, -(2**63)):
        both.call("find_or_insert", torch.full((count,), key))
        both.call("insert_or_assign", torch.full((count,), key), torch.arange(float(count)).unsqueeze(1))
    both.check()
    both.call("clear")
    both.check()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 3, 7, 33, 100])
def test_widths_and_types(dim, dtype, device):
    both = Both(device, dim=dim, dtype=dtype, init="zero", max_capacity=90, when_full="evict")
    generator = torch.Generator().manual_seed(dim)
    for count in (1, 77, 33):
        keys = torch.randint(-60, 60, (count,), generator=generator)
        both.call("insert_or_assign", keys, torch.randn(count, dim, generator=generator).to(both.true.weight.dtype))
        both.call("assign", keys + 1, torch.randn(count, dim, generator=generator).to(both.true.weight.dtype))
        both.call("find", torch.arange(-70, 70))
    both.check()


def test_places_that_a_device_lacks_are_refused():
    with pytest.raises(ConfigError, match="for tables on a GPU"):
        DynamicTable(DynamicTableConfig(name="t", dim=1, memory="host"), SGD())
    with pytest.raises(ConfigError, match="belong together"):
        DynamicTableConfig(name="t", dim=1, memory="split")
    with pytest.raises(ConfigError, match="no such device"):
        DynamicTable(DynamicTableConfig(name="t", dim=1), SGD(), device="meta")
