"""Several readers share the batches of one epoch: together they see what one reader sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_rows import SCHEMA, columns_of, make_rows, rows_of

from viviane.core.errors import ConfigError
from viviane.data import Dataset, write_dataset


@pytest.fixture(scope="module", params=["parquet", "viviane"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rows = [columns_of(make_rows(53))]
    folder = tmp_path_factory.mktemp("shares") / "set"
    return write_dataset(folder, SCHEMA, rows, format=request.param, rows_per_group=7, rows_per_file=21)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [2, 10, 26, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_make_up_the_batches(data: Dataset, num_ranks: int, batch_size: int, shuffle: bool) -> None:
    options = {"shuffle": shuffle, "shuffle_rows": 15, "seed": 5}
    whole = [rows_of(batch) for batch in data.reader(batch_size, **options)]
    shares = [
        [rows_of(batch) for batch in data.reader(batch_size, rank=rank, num_ranks=num_ranks, **options)]
        for rank in range(num_ranks)
    ]
    assert {len(share) for share in shares} == {len(whole)}  # equally many batches, some perhaps without rows
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert [row for part in parts for row in part] == batch
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_position_serves_any_number_of_ranks(data: Dataset) -> None:
    first = data.reader(10, rank=1, num_ranks=2, shuffle=True)
    batches = iter(first)
    next(batches)
    next(batches)
    state = first.state()
    first.close()
    one = data.reader(10, shuffle=True)
    one.restore(state)
    whole = [rows_of(batch) for batch in one]
    assert len(whole) == 4
    parts = []
    for rank in range(5):
        reader = data.reader(10, rank=rank, num_ranks=5, shuffle=True)
        reader.restore(state)
        parts.append([rows_of(batch) for batch in reader])
    joined = [[row for part in parts for row in part[number]] for number in range(4)]
    assert joined == whole


def test_a_rank_decodes_only_the_groups_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_dataset(tmp_path / "set", SCHEMA, [columns_of(make_rows(40))], rows_per_group=5)
    decoded = []
    decode = data.storage.decode
    monkeypatch.setattr(data.storage, "decode", lambda group, *rest: (decoded.append(group), decode(group, *rest))[1])
    rows = [row["row"] for batch in data.reader(40, rank=2, num_ranks=4) for row in rows_of(batch)]
    assert rows == list(range(20, 30))
    assert sorted(group.first_row for group in decoded) == [20, 25]


@pytest.mark.parametrize(("rank", "num_ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_out_of_range(data: Dataset, rank: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        data.reader(10, rank=rank, num_ranks=num_ranks)
