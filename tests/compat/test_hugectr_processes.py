"""A script under torchrun: the processes share each batch and come to the numbers of one; the first one speaks."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "programs" / "ncf.py"
LOSS = re.compile(r"Iter: (\d+) Time\(\d+ iters\): [\d.]+s Loss: ([\d.]+) lr:")
METRIC = re.compile(r"Evaluation, (\w+): ([\d.]+)")


TALK = """
from mpi4py import MPI
import hugectr
import numpy as np
import os
from hugectr.tools import DataGenerator, DataGeneratorParams

c = MPI.COMM_WORLD
mine = c.Get_rank() + 1
params = DataGeneratorParams(hugectr.DataReaderType_t.Raw, 1, 1, 1, False, f"{mine - 1}.bin", "val.bin", [5],
                             num_samples=10, eval_num_samples=10)
if mine == 1:
    DataGenerator(params).generate()
params.source = "both.bin"
DataGenerator(params).generate()
assert os.path.getsize("both.bin") == os.path.getsize("0.bin") == 120
array = np.full(2, mine)
c.Bcast(array, root=1)
c.Barrier()
found = [c.bcast(mine, root=1), c.allgather(mine), c.allreduce(mine), c.allreduce(mine, op=MPI.MAX),
         c.scatter([5, 6] if mine == 1 else None), c.gather(mine), c.reduce(mine, op=MPI.PROD, root=1), array.tolist()]
open(f"found{mine}", "w").write(repr(found))
"""


def run(processes: int, folder: Path, program: Path = PROGRAM) -> str:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
            "-m",
            "viviane",
            "hugectr",
            str(program),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_two_processes_train_to_the_numbers_of_one(tmp_path: Path) -> None:
    one, two = run(1, tmp_path / "one"), run(2, tmp_path / "two")
    assert [i for i, _ in LOSS.findall(one)] == [i for i, _ in LOSS.findall(two)]  # said once
    losses = [[float(loss) for _, loss in LOSS.findall(text)] for text in (one, two)]
    # sums of float32 gradients in another order, grown over 100 steps of Adam
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-3)
    metrics = [[float(value) for _, value in METRIC.findall(text)] for text in (one, two)]
    np.testing.assert_allclose(metrics[1], metrics[0], atol=0.02)  # one of 64 rows may change its rank
    assert "Warning: vvgpu [[0]]: 2 processes of torchrun share each batch" in two


@pytest.mark.slow
def test_tables_lie_where_shard_says_and_train_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    one, two = (run(count, tmp_path / str(count), PROGRAM.with_name("ebc.py")) for count in (1, 2))
    placed = "table0 row [0, 1], table1 replicated everywhere, table2 table [0], table3 replicated everywhere"
    assert f"Tables are sharded over 2 processes by shard: {placed}" in two
    assert "accepted, without effect here: use_exclusive_keys, shard" in one
    losses = [[float(loss) for _, loss in LOSS.findall(text)] for text in (one, two)]
    assert len(losses[0]) == 6
    # sums of float32 gradients in another order, over 120 steps
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-3)


@pytest.mark.slow
def test_keys_without_sizes_are_loaded_into_tables_of_two_processes(tmp_path: Path) -> None:
    one, two = (run(count, tmp_path / str(count), PROGRAM.with_name("reload.py")) for count in (1, 2))
    found = [[float(value) for value in re.findall(r"'\w+', ([\d.]+)", text)] for text in (one, two)]
    assert len(found[0]) == 2
    assert len(found[1]) == 4  # each process says it
    # sums of float32 gradients in another order, grown over 20 steps of Adam; one of 64 rows may change its rank
    np.testing.assert_allclose(found[1], found[0] * 2, atol=0.02)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py itself answers")
def test_processes_talk_through_the_stand_in_for_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    assert "the 2 processes of torchrun are used" in run(2, tmp_path, tmp_path / "talk.py")
    first, second = ((tmp_path / name).read_text() for name in ("found1", "found2"))
    assert first == repr([2, [1, 2], 3, 2, 5, [1, 2], None, [2, 2]])
    assert second == repr([2, [1, 2], 3, 2, 6, None, 2, [2, 2]])
