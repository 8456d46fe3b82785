"""Incremental checkpoints of dynamic tables: the bits of whole ones after any calls, crafted chains, kill -9 in a save.

Run as a script, it is a run to be killed in the save of an increment: test_dynamic_increments.py FOLDER.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from viviane.config import Adam
from viviane.core.errors import CheckpointError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig
from viviane.embedding.dynamic_content import state_entries
from viviane.training import CheckpointStore, Progress, load_checkpoint, read_manifest, verify_checkpoint
from viviane.training.checkpoint import dynamic_increments
from viviane.training.checkpoint.increments import open_table
from viviane.training.checkpoint.tensor_files import read_tensors, write_tensors
from viviane.training.checkpoint.tools import compact, compare_checkpoints

ADMISSIONS = (None, {"type": "count", "count": 2, "max_pending": 6}, {"type": "filter", "count": 2, "width": 16},
              {"type": "probability", "probability": 0.5})  # fmt: skip
FULL = "emb.t"


class Tables(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        table = DynamicTableConfig(name="t", dim=2, init="normal", initial_capacity=1, **options)
        self.emb = EmbeddingCollection([table], [FeatureConfig(name="t", table="t")], Adam(), seed=3)

    @property
    def table(self) -> Any:
        return self.emb.dynamic_table("t")

    def train(self, *keys: int) -> Any:
        self.emb({"t": torch.tensor(keys)}).flat.sin().sum().backward()
        self.emb.step(lr=0.1)


def content_of(module: Tables) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in state_entries(module.table, "").items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(found[name], one), name


def save(store: CheckpointStore, module: Tables, step: int, beside: bool = False) -> None:
    store.save(module, None, Progress(step=step), beside=beside)
    store.finish()


keys_of = st.lists(st.integers(-12, 12), min_size=1, max_size=8)
calls = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["train", "train", "erase"]), keys_of),
        st.tuples(st.just("assign"), keys_of), st.tuples(st.just("accumulate"), keys_of),
        st.tuples(st.just("insert"), keys_of), st.tuples(st.just("look"), keys_of),
        st.tuples(st.sampled_from(["clear", "epoch", "replace", "save", "save", "save", "beside"]), st.just([])),
    ),
    min_size=3, max_size=16,
)  # fmt: skip
options_of = st.fixed_dictionaries({
    "eviction": st.sampled_from(["lru", "lfu", "epoch_lru", "epoch_lfu"]), "max_capacity": st.just(9),
    "when_full": st.just("evict"), "admission": st.sampled_from(ADMISSIONS),
})  # fmt: skip


def call(module: Tables, what: str, given_keys: list[int]) -> None:
    keys = torch.tensor(given_keys, dtype=torch.int64)
    values = torch.arange(2.0 * len(keys)).view(-1, 2)
    table = module.table
    if what == "train":
        module.train(*given_keys)
    elif what == "look":
        module.emb.eval()({"t": keys})
        module.emb.train()
    elif what in ("assign", "accumulate"):
        getattr(table, what)(keys, values)
    elif what == "insert":
        table.insert_or_assign(keys, values)
    elif what == "erase":
        table.erase(keys)
    elif what == "clear":
        table.clear()
    elif what == "replace":
        table.load_state_dict(content_of(module))
    elif what == "epoch" and table.table.eviction.startswith("epoch"):
        table.next_epoch()


@settings(max_examples=15, deadline=None)
@given(calls, options_of, st.sampled_from([1, 64 << 20]), st.data())
def test_any_calls_and_saves_resume_as_whole_ones(
    tmp_path_factory: pytest.TempPathFactory, given_calls: Any, options: Any, in_memory: int, data: Any
) -> None:
    folder, module = tmp_path_factory.mktemp("run"), Tables(**options)
    store, truths = CheckpointStore(folder, 99, most_increments=data.draw(st.integers(1, 4))), {}
    for step, (what, keys) in enumerate([*given_calls, ("save", [])], 1):
        if what in ("save", "beside"):
            save(store, module, step, beside=what == "beside")
            truths[step] = content_of(module)
        else:
            call(module, what, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_increments, "_IN_MEMORY", in_memory)
        for step, truth in truths.items():
            other = Tables(**options)
            load_checkpoint(store.path(step), other)
            assert_equal(content_of(other), truth)
            saved = open_table(store.path(step), read_manifest(store.path(step)), FULL)
            assert_equal(saved.content(), truth)
    # The resumed run and the one that went on make the same calls from here on, with the same evictions.
    for keys in ([1, 2, 3, 30, 31, 32], [33, 34, 1, 30, 35], [36, 37, 38, 39, 30, 30]):
        module.train(*keys)
        other.train(*keys)
    assert_equal(content_of(other), content_of(module))
    shutil.rmtree(folder)


def chain(folder: Path) -> tuple[CheckpointStore, Tables]:
    """A whole checkpoint at step 1, increments at 2 and 3; 40 keys, of which each increment has few."""
    module, store = Tables(), CheckpointStore(folder, 9, most_increments=5)
    for step, keys in enumerate((range(40), (3, 50, 3), (50, 4)), 1):
        if step == 3:
            module.table.erase(torch.tensor([7, 8]))
        module.train(*keys)
        save(store, module, step)
    return store, module


def test_an_increment_holds_the_keys_that_changed(tmp_path: Path) -> None:
    store, module = chain(tmp_path / "run")
    second, third = (read_manifest(store.path(step)) for step in (2, 3))
    assert second.tables[FULL].is_increment
    assert (second.tables[FULL].weight.shape[0], third.tables[FULL].weight.shape[0]) == (41, 39)
    assert (second.version, read_manifest(store.path(1)).version) == (4, 1)
    file = second.tables[FULL].file or ""
    assert read_tensors(store.path(2) / file)["keys"].tolist() == [3, 50]
    compact(store.path(3), tmp_path / "whole")
    assert not compare_checkpoints(tmp_path / "whole", store.path(3))
    assert not read_manifest(tmp_path / "whole").tables[FULL].is_increment
    other = Tables()
    load_checkpoint(tmp_path / "whole", other)
    assert_equal(content_of(other), content_of(module))


def test_rows_that_wait_for_their_update_at_a_save_are_in_the_next_increment(tmp_path: Path) -> None:
    store, module = chain(tmp_path / "run")
    out = module.emb({"t": torch.tensor([1, 2])}).flat
    save(store, module, 4)
    out.sum().backward()
    module.emb.step(lr=0.5)
    save(store, module, 5)
    other = Tables()
    load_checkpoint(store.path(5), other)
    assert_equal(content_of(other), content_of(module))


def test_crafted_increments_are_refused(tmp_path: Path) -> None:
    store, _ = chain(tmp_path / "run")
    manifest = read_manifest(store.path(3))
    entry = manifest.tables[FULL]
    path = store.path(3) / (entry.file or "")
    good = {name: one.clone() for name, one in read_tensors(path).items()}
    bad: dict[str, dict[str, Tensor]] = {
        "rows fall": {"rows": good["rows"].flip(0)}, "rows are negative": {"rows": good["rows"] - 100},
        "rows lie beyond the table": {"rows": good["rows"] + 10**12},
        "rows of another type": {"rows": good["rows"].int()},
        "fewer rows than keys": {"rows": good["rows"][:1]}, "rows that are free": {"free": good["rows"][:1]},
        "free rows twice": {"free": good["free"][:1].repeat(2)}, "free rows beyond": {"free": good["free"] + 10**9},
        "more free rows": {"free": torch.arange(300, 400)}, "fewer free rows": {"free": good["free"][:0]},
        "another width": {"weight": torch.zeros(2, 3)}, "another type": {"weight": good["weight"].half()},
        "less state": {"state.m": good["state.m"][:1]}, "no stamps": {"stamps": good["stamps"][:1]},
        "flat keys": {"keys": good["keys"].view(-1, 1)},
    }  # fmt: skip
    for what, change in bad.items():
        write_tensors(path, {**good, **change})
        try:
            found = open_table(store.path(3), manifest, FULL).content()
        except CheckpointError:
            continue
        assert what == "fewer free rows"  # a row less that is free, and one less in all
        assert len(found["rows"]) == entry.weight.shape[0]
    for name in ("rows", "free", "keys", "stamps", "weight", "state.v"):
        write_tensors(path, {other: one for other, one in good.items() if other != name})
        with pytest.raises(CheckpointError):
            open_table(store.path(3), manifest, FULL).content()
    write_tensors(path, good)
    huge = entry.model_copy(update={"weight": entry.weight.model_copy(update={"shape": (1 << 60, 2)})})
    with pytest.raises(CheckpointError, match="fewer keys than its manifest"):
        open_table(store.path(3), manifest.model_copy(update={"tables": {FULL: huge}}), FULL).content()


def test_a_missing_or_other_base_is_named(tmp_path: Path) -> None:
    store, _ = chain(tmp_path / "run")
    shutil.copytree(store.path(1), tmp_path / "kept")
    (store.path(2) / (read_manifest(store.path(2)).tables[FULL].file or "")).unlink()
    with pytest.raises(CheckpointError, match="step-00000002"):
        verify_checkpoint(store.path(3))
    assert store.latest_whole() == store.path(1)
    shutil.rmtree(store.path(2))
    with pytest.raises(CheckpointError, match="base of an incremental checkpoint is missing"):
        verify_checkpoint(store.path(3))
    shutil.copytree(tmp_path / "kept", store.path(2))
    with pytest.raises(CheckpointError, match="another checkpoint"):
        load_checkpoint(store.path(3), Tables())


def test_a_run_that_is_killed_in_an_increment_resumes_from_the_one_before(tmp_path: Path, warm: Any) -> None:
    process = warm.start([__file__, tmp_path / "run"], cwd=tmp_path)
    process.wait()
    store = CheckpointStore(tmp_path / "run", 9, most_increments=5)
    assert store.steps() == [1, 2, 3]
    assert list((tmp_path / "run").glob(".step-00000004*")), "killed while it was written"
    store.clean()
    found, truth = store.latest_whole(), chain(tmp_path / "truth")[1]
    assert found == store.path(3)
    module = Tables()
    load_checkpoint(found, module)
    store.begin_increments(module, 3)
    module.train(5, 90)
    truth.train(5, 90)
    save(store, module, 4)
    other = Tables()
    load_checkpoint(store.path(4), other)
    assert read_manifest(store.path(4)).tables[FULL].is_increment
    assert_equal(content_of(other), content_of(truth))


def be_killed(folder: Path) -> None:
    import signal

    from viviane.training.checkpoint import write

    store, module = chain(folder)
    module.train(5, 90)
    writes = write.write_manifest

    def kill(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        writes(*arguments)

    write.write_manifest = kill  # type: ignore[assignment]
    save(store, module, 4)


if __name__ == "__main__":
    be_killed(Path(sys.argv[1]))
