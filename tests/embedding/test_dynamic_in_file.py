"""Dynamic tables whose rows lie in files: the bits of tables in memory, and what a full disk or another device says."""

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import viviane as vv
from viviane.config import SGD, AdaGrad, Adam, Ftrl, RMSProp
from viviane.core.errors import ConfigError, VivianeError
from viviane.embedding import DynamicTable, DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.cache_sizes import CacheSettings, divided
from viviane.embedding.dynamic_content import entry_names
from viviane.embedding.dynamic_rows import page_offsets
from viviane.embedding.dynamic_store import DynamicStore
from viviane.ops.hash_table import MappedFile, reserve

RULES = [
    SGD(), SGD(momentum=0.9), AdaGrad(), AdaGrad(row_wise=True), RMSProp(), Adam(), Adam(update="lazy_global"),
    Ftrl(lambda1=0.01),
]  # fmt: skip
KEYS = st.lists(st.lists(st.integers(-9, 9).map(lambda k: k * 10**15 + k), min_size=1, max_size=12), max_size=8)


def _pair(rule, folder, **options):
    options = {"name": "item", "dim": 3, "init": "normal", "initial_capacity": 2} | options
    return [
        DynamicTable(DynamicTableConfig(memory=memory, **options), rule, seed=5, folder=folder)
        for memory in ("device", "file")
    ]


def _assert_equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        assert part.dtype == theirs[name].dtype, name
        assert torch.equal(part, theirs[name]), name


def _train(tables, keys):
    for table in tables:
        out = table(torch.tensor(keys))
        (out * torch.arange(1.0, out.numel() + 1).view_as(out).sin()).sum().backward()
        table.step(lr=0.1)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_state_are_those_of_a_table_in_memory(rule, dtype, tmp_path):
    tables = _pair(rule, tmp_path, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        _train(tables, (torch.randint(-40, 40, (30,), generator=generator) * 10**12).tolist())
    _assert_equal(*tables)
    assert len(tables[0]) > 40
    assert not list(tmp_path.iterdir()), "the working files have no names"


@settings(max_examples=15, deadline=None)
@given(steps=KEYS, admission=st.sampled_from([None, {"type": "count", "count": 2}, {"type": "filter", "count": 2}]),
       eviction=st.sampled_from(["lru", "lfu", "epoch_lru"]), absent=st.sampled_from(["zero", "initial"]))  # fmt: skip
def test_any_sequence_with_admission_eviction_and_loading(steps, admission, eviction, absent):
    options = {"max_capacity": 13, "when_full": "evict", "eviction": eviction, "admission": admission, "absent": absent}
    tables = _pair(Adam(), None, **options)
    for number, keys in enumerate(steps):
        _train(tables, keys)
        if number % 3 == 2:  # as a resumed run does, each from the other's content
            saved = [table.state_dict() for table in tables]
            tables = _pair(Adam(), None, **options)
            for table, content in zip(tables, reversed(saved), strict=True):
                table.load_state_dict(content)
    _assert_equal(*tables)


def test_a_copy_in_pieces_is_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("viviane.embedding.dynamic_rows._COPIED_BYTES", 40)
    tables = _pair(AdaGrad(row_wise=True), tmp_path)
    _train(tables, list(range(50)))
    _assert_equal(*tables)
    empty = _pair(AdaGrad(row_wise=True), tmp_path)
    _assert_equal(*empty)


def test_a_collection_uses_the_folder(tmp_path):
    table = DynamicTableConfig(name="user", dim=2, memory="file")
    where = CacheSettings(folder=tmp_path / "rows")
    emb = EmbeddingCollection([table], [FeatureConfig(name="user", table="user")], SGD(), cache=where)
    assert (tmp_path / "rows").is_dir()
    emb({"user": torch.tensor([7, 10**14])}).flat.sum().backward()
    emb.step(lr=0.5)
    assert len(emb.dynamic_table("user")) == 2


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(file, first, count):
        raise OSError(28, "No space left on device")

    vector = MappedFile(1 << 20, torch.float32, tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(VivianeError, match="no disk is left"):
        vector.allocate(0, 4096)


def test_rows_are_limited_by_the_disk_and_the_memory_of_keys(tmp_path):
    assert reserve.rows_of_disk(2**62, 1, tmp_path / "not" / "there") == 1
    assert reserve.rows_of_disk(1, 64, tmp_path) <= reserve.rows_of_memory(64)


def test_another_device_is_refused(monkeypatch):
    from viviane.embedding.dynamic_rows import DynamicRows

    with pytest.raises(ConfigError, match="memory='file' is for tables on the CPU"):
        DynamicRows(DynamicTableConfig(name="t", dim=1, memory="file"), SGD(), 0, torch.device("cuda"))


def test_a_full_disk_is_an_error_that_changes_no_key(tmp_path, monkeypatch):
    _, table = _pair(Adam(), tmp_path, initial_capacity=4)
    table.insert_or_assign(torch.arange(4), torch.ones(4, 3))
    before = table.state_dict()
    taken = os.posix_fallocate

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    many = torch.arange(10_000)
    for use in (lambda: table.insert_or_assign(many, torch.ones(10_000, 3)), lambda: table.train()(many)):
        with pytest.raises(VivianeError, match=r"no disk is left(.|\n)*No space left"):
            use()
    assert len(table) == 4
    monkeypatch.setattr(os, "posix_fallocate", taken)
    table.release()
    assert torch.equal(before["weight"], table.state_dict()["weight"])
    table.insert_or_assign(many, torch.ones(10_000, 3))
    assert len(table) == 10_000


def placed_in(table: DynamicTableConfig, cache: CacheSettings) -> str:
    own = EmbeddingCollection(
        [TableConfig(name="a", num_rows=100, dim=2), table],
        [FeatureConfig(name="a", table="a"), FeatureConfig(name="b", table="b")], SGD(), cache=cache,
    )  # fmt: skip
    return own.dynamic_table("b").table.memory


def test_collections_place_dynamic_tables_by_their_memory(tmp_path):
    bounded = DynamicTableConfig(name="b", dim=2, max_capacity=100)
    unbounded = DynamicTableConfig(name="b", dim=2)
    # 30 bytes a row: 8 of numbers, and 22 as in a cache.
    for table, given_memory, place in [
        (bounded, {"tables": {"b": 3000}}, "device"),
        (bounded, {"tables": {"b": 2999}}, "file"),
        (unbounded, {"tables": {"b": "1 GiB"}}, "file"),
        (unbounded, {"tables": {"a": 300}}, "device"),
        (bounded, {"memory": 6000}, "device"),
        (bounded, {"memory": 5800}, "file"),
        (unbounded, {"memory": "1 GiB"}, "file"),
    ]:
        assert placed_in(table, CacheSettings(folder=tmp_path, **given_memory)) == place, given_memory


def test_what_a_dynamic_table_does_not_need_goes_to_the_others():
    fixed, dynamic = TableConfig(name="a", num_rows=1000, dim=2), DynamicTableConfig(name="b", dim=2, max_capacity=10)
    left, short = divided([fixed, dynamic], SGD(), CacheSettings(memory=30 * 110))
    assert (left.memory, short) == (30 * 100, {})
    left, short = divided([fixed, dynamic], SGD(), CacheSettings(memory=30 * 110, tables={"b": 30 * 5, "a": 30 * 7}))
    assert (left.memory, left.tables, short) == (30 * 105, {"a": 30 * 7}, {"b": 30 * 5})


def test_a_table_that_has_its_place_takes_no_share_and_no_size():
    fixed, dynamic = TableConfig(name="a", num_rows=1000, dim=2), DynamicTableConfig(name="b", dim=2)
    in_file = DynamicTableConfig(name="c", dim=2, memory="file")
    left, short = divided([fixed, dynamic, in_file], SGD(), CacheSettings(memory=30 * 100))
    assert (left.memory, short) == (30 * 50, {"b": 30 * 50})
    with pytest.raises(ConfigError, match=r"(?s)a place of its own.*table 'c'.*leave one of them out"):
        divided([in_file], SGD(), CacheSettings(tables={"c": 3000}))


def test_a_share_of_no_row_places_all_rows_outside(tmp_path):
    tables = [DynamicTableConfig(name=name, dim=2) for name in "bc"]
    features = [FeatureConfig(name=name, table=name) for name in "bc"]
    _, short = divided(tables, SGD(), CacheSettings(memory=30))
    assert short == {"b": 1, "c": 30}
    own = EmbeddingCollection(tables, features, SGD(), cache=CacheSettings(tables=short, folder=tmp_path))
    assert [own.dynamic_table(name).table.memory for name in "bc"] == ["file", "file"]


def test_a_size_beyond_what_a_table_needs_is_left_to_the_others():
    fixed, dynamic = TableConfig(name="a", num_rows=1000, dim=2), DynamicTableConfig(name="b", dim=2, max_capacity=10)
    settings = CacheSettings(memory=30 * 110, tables={"b": "1 GiB"})
    left, short = divided([fixed, dynamic], SGD(), settings)
    assert (left.memory, left.tables, short) == (30 * 100, {}, {})


@given(row_bytes=st.integers(1, 50), page_bytes=st.integers(1, 20), first=st.integers(0, 100))
def test_the_bytes_read_ahead_lie_in_all_pages_of_a_row(row_bytes, page_bytes, first):
    touched = [first + offset for offset in page_offsets(row_bytes, page_bytes)]
    assert all(first <= place < first + row_bytes for place in touched)
    assert {place // page_bytes for place in touched} == {(first + i) // page_bytes for i in range(row_bytes)}


def _is_in_memory(libc, row):
    first, last = (place // mmap.PAGESIZE for place in (row.data_ptr(), row.data_ptr() + row.numel() * 4 - 1))
    seen = (ctypes.c_ubyte * (last + 1 - first))()
    assert libc.mincore(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(len(seen) * mmap.PAGESIZE), seen) == 0
    return all(one & 1 for one in seen)


def test_rows_are_read_ahead_from_the_disk(tmp_path):
    _, table = _pair(Adam(), tmp_path, dim=1500)  # rows of one and a half pages
    rows = table.find_or_insert(torch.arange(64) * 10**12)
    table.release()
    before = table.state_dict()
    libc, parts = ctypes.CDLL(None), (table.weight, *table.state.values())
    for part in parts:
        size = ctypes.c_size_t(part.numel() * part.element_size())
        assert libc.madvise(ctypes.c_void_p(part.data_ptr()), size, mmap.MADV_DONTNEED) == 0
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).startswith(str(tmp_path)):
            os.fsync(int(link.name))
            os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
    if all(_is_in_memory(libc, part[row]) for part in parts for row in rows.tolist()):
        pytest.skip("this disk is memory")
    assert not any(_is_in_memory(libc, part[row]) for part in parts for row in rows.tolist())
    wanted = torch.cat([rows[::2], torch.tensor([table.null_row, table.null_row + 1])])
    table.read_ahead(wanted, training=True)
    assert all(_is_in_memory(libc, part[row]) for part in parts for row in rows[::2].tolist())
    for name, part in table.state_dict().items():
        assert torch.equal(part, before[name]), name


def test_a_file_has_no_name_even_while_it_is_made(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        pytest.skip("this disk has no files without a name")

    def never(*arguments, **options):
        raise AssertionError("a kill before this would leave a file behind")

    monkeypatch.setattr(os, "unlink", never)
    vector = MappedFile(1 << 20, torch.float32, tmp_path)
    vector.allocate(0, 4096)
    vector.tensor[:3] = 1.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("admission", [None, {"type": "count", "count": 2}, {"type": "filter", "count": 2, "width": 8}])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_loading_copies_no_row_of_the_table_before(tmp_path, monkeypatch, admission, eviction):
    options = {"max_capacity": 13, "when_full": "evict", "eviction": eviction, "admission": admission}
    for table in _pair(Adam(), tmp_path, **options):
        _train([table], [1, 1, 2, 2, 3])
        content, names = table.state_dict(), entry_names(table)
        assert names == list(content)
        with monkeypatch.context() as patched:
            patched.setattr(DynamicStore, "copied", None)
            table.load_state_dict(content)
        assert all(torch.equal(part, content[name]) for name, part in table.state_dict().items())


@pytest.mark.parametrize("folder", ["s3://bucket/rows", "x" * 300, "a\0b"])
def test_a_folder_that_is_none_of_this_machine(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL became a folder `s3:` below the working directory; a long name was a raw error."""
    monkeypatch.chdir(tmp_path)
    from viviane.embedding.dynamic_rows import DynamicRows

    table = DynamicTableConfig(name="user", dim=2, memory="file")
    with pytest.raises(ConfigError):
        DynamicRows(table, SGD(), 0, folder=folder)  # type: ignore[arg-type]
    schema = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "user", "num_ids": 900}])

    def compiled(folder: str) -> None:
        model = vv.Model(vv.Solver(device="cpu", embedding_folder=folder, embedding_memory="8 KiB"), schema)
        model.add(vv.zoo.DeepFM(dim=4, deep_mlp=[2]))
        model.compile()

    with pytest.raises(ConfigError):
        compiled(folder)
    assert not list(tmp_path.iterdir())
    compiled("rows")
