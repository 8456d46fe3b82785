"""Cells of notebooks: shell lines and magics in blocks and assignments, text that only looks like them, refusals."""

import json
import time
from pathlib import Path

import pytest

from viviane.compat.hugectr import run_script
from viviane.compat.hugectr.notebook import Line, Magic, Source, steps_of
from viviane.core.errors import ConfigError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEVEL", "one")


def run(*cells: str) -> None:
    """Run cells, whose assertions count: the last one notes that all of them ran."""
    sources = ("import hugectr, os", *cells, "open('ended.txt', 'w').close()")
    Path("n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": one} for one in sources]}))
    Path("ended.txt").unlink(missing_ok=True)
    run_script("n.ipynb")
    assert Path("ended.txt").exists()


def test_a_cell_assigns_the_output_of_a_shell_line() -> None:
    run(
        "folder = 'd'\nos.mkdir(folder)\nopen('d/b.txt', 'w').close()\nopen('d/a.txt', 'w').close()",
        "files = !ls {folder + '/'}",
        "assert files == ['a.txt', 'b.txt'] and files.n == 'a.txt\\nb.txt' and files.s == 'a.txt b.txt'\n"
        "assert files.l == list(files)",
        "%%writefile a.py\nimport hugectr\nprint('in a child', hugectr.Adam.name)",
        "box = {}\nbox['out'] = !python a.py\nassert box['out'][-1] == 'in a child Adam', box",
        "here = %pwd\nlevel = %env LEVEL\nassert (level, here) == ('one', os.getcwd())",
        "value = %time len('abc')\n%timeit -n 2 -r 1 done = True\nassert value == 3 and done",
        "count = !ls d | wc -l\nassert int(count[0]) == 2",
    )


def test_shell_lines_and_magics_in_blocks_run_in_their_place() -> None:
    run(
        "made = []\nfor name in ('x', 'y'):\n    if name == 'y':\n        !mkdir {name}\n        made.append(name)\n"
        "    else:\n        %mkdir {name}\nassert os.path.isdir('x') and os.path.isdir('y') and made == ['y']",
        "try:\n    %time len(3)\nexcept TypeError:\n    failed = True\nassert failed",
        "def listed():\n    found = !ls -d x y\n    return found\nassert listed() == ['x', 'y']",
        "if len(made) == 1:\n    len?\n    made += [2]\nlen??\n?len\nassert made == ['y', 2]",
    )


def test_the_source_of_a_cells_functions_is_found() -> None:
    run("import inspect\ndef one():\n    return 1", "assert inspect.getsource(one) == 'def one():\\n    return 1\\n'")


def test_text_that_only_looks_like_a_shell_line_or_a_magic_stays() -> None:
    run(
        "text = '''\n!rm -rf x\n%s of them\n''' % 'two'\nassert text == '\\n!rm -rf x\\ntwo of them\\n'",
        "left = (7\n%two\n) if False else (7\n%4\n)\nassert left == 3",
        "left = 7 \\\n%4\nassert left == 3 and (left !=4)",
    )


def test_words_of_a_shell_line_are_expanded_as_a_shell_does() -> None:
    run(
        "%%writefile p.py\nimport hugectr, json, pathlib, sys\n"
        "pathlib.Path('args.json').write_text(json.dumps(sys.argv[1:]))",
        "import json, pathlib\nfor name in 'ab':\n    open(f'{name}.csv', 'w').close()\nos.environ['ROOT'] = 'data'\n"
        "def args(folder):\n    return json.loads(pathlib.Path(folder, 'args.json').read_text())",
        "!python p.py $ROOT/x ${ROOT} *.csv '*.csv' none*.csv",
        "assert args('.') == ['data/x', 'data', 'a.csv', 'b.csv', '*.csv', 'none*.csv']",
        "!mkdir to && cp *.csv to",
        "assert sorted(os.listdir('to')) == ['a.csv', 'b.csv']",
        "%%bash\n# one shell for all lines\ncd to\nexport KIND=csv\nNAME=a\npython ../p.py $KIND $NAME *.csv",
        "assert args('to') == ['csv', 'a', 'a.csv', 'b.csv']\n"
        "assert 'KIND' not in os.environ and os.path.basename(os.getcwd()) != 'to'",
    )


DATA = """
from hugectr.tools import DataGenerator, DataGeneratorParams
kind = hugectr.DataReaderType_t.Raw
params = DataGeneratorParams(kind, 1, 1, 1, False, "a.bin", "b.bin", [5], num_samples=40, eval_num_samples=20)
DataGenerator(params).generate()
"""
MODEL = """
solver = hugectr.CreateSolver(batchsize=10, batchsize_eval=10, max_eval_batches=2)
reader = hugectr.DataReaderParams(kind, "a.bin", eval_source="b.bin", num_samples=40, eval_num_samples=20)
model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
model.add(hugectr.Input(1, "label", 1, "dense", [hugectr.DataReaderSparseParam("x", 1, True, 1)]))
table = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
model.add(hugectr.SparseEmbedding(table, 1, 4, "sum", "e", "x"))
model.add(hugectr.DenseLayer(hugectr.Layer_t.Reshape, ["e"], ["r"], leading_dim=4))
model.add(hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, ["r"], ["fc"]))
model.add(hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"]))
"""


def test_a_model_is_trained_in_other_cells_than_the_one_that_compiles_it() -> None:
    run(
        DATA,
        MODEL,
        "%%writefile other.py\nimport hugectr",
        "model.compile()",
        "model.train()",
        "!python other.py",
        "model.fit(max_iter=3)",
        "assert model.eval() and model.get_eval_metrics()[0][0] == 'AUC'",
    )


def test_huge_ctr_trains_from_json() -> None:
    layers = [
        {"type": "Data", "format": "Raw", "source": "a.bin", "eval_source": "b.bin", "check": "None",
         "num_samples": 40, "eval_num_samples": 20, "label": {"top": "label", "label_dim": 1},
         "dense": {"top": "dense", "dense_dim": 1},
         "sparse": [{"top": "x", "type": "DistributedSlot", "max_feature_num_per_sample": 1, "slot_num": 1}]},
        {"name": "e", "type": "DistributedSlotSparseEmbeddingHash", "bottom": "x", "top": "e",
         "sparse_embedding_hparam": {"max_vocabulary_size_per_gpu": 10, "embedding_vec_size": 2, "combiner": 0}},
        {"name": "r", "type": "Reshape", "bottom": "e", "top": "r", "leading_dim": 2},
        {"name": "fc", "type": "InnerProduct", "bottom": "r", "top": "fc", "fc_param": {"num_output": 1}},
        {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": ["fc", "label"], "top": "loss"},
    ]  # fmt: skip
    solver = {"lr_policy": "fixed", "display": 1, "max_iter": 2, "gpu": [0], "batchsize": 10, "snapshot": 2,
              "snapshot_prefix": "./j", "eval_interval": 2, "max_eval_batches": 1}  # fmt: skip
    Path("g.json").write_text(json.dumps({"solver": solver, "optimizer": {"type": "Adam"}, "layers": layers}))
    run(
        DATA,
        MODEL + "\nmodel.compile()",
        "!../build/bin/huge_ctr --train g.json > log",
        "assert os.path.exists('j_dense_2.model') and model.train()",
    )
    Path("j_dense_2.model").unlink()
    run_script("g.json")
    assert Path("j_dense_2.model").exists()


def test_output_of_commands_is_kept_in_the_file_it_is_sent_to() -> None:
    run(
        "folder = 'd'\n!mkdir {folder}",
        "%%writefile {folder}/a.py\nimport hugectr, sys\nprint('printed', *sys.argv[1:])",
        "!python d/a.py 1 > one.log 2>&1; python d/a.py 2 >> one.log\n!python d/a.py 3 2> none.log | tee two.log",
        "from pathlib import Path\nassert Path('one.log').read_text() == 'printed 1\\nprinted 2\\n'",
        "assert Path('two.log').read_text() == 'printed 3\\n' and not Path('none.log').exists()",
        "!echo 1 > list.txt\n!ls d/*.py >> list.txt\n!ls d | wc -l > count.txt\n!env LEVEL=2 python d/a.py 4 > env.log",
        "assert Path('list.txt').read_text() == '1\\nd/a.py\\n' and int(Path('count.txt').read_text()) == 1",
        "assert Path('env.log').read_text() == 'printed 4\\n'\ndisplay(folder)",
    )


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%sql select 1", "magic of IPython is not supported"),
        ("%%cython\ndef f(): pass", "%%cython"),
        ("%%capture out\nprint(3)", "%%capture out"),
        ("%%python3\nprint(3)", "%%python3"),
        ("x = %matplotlib_of_mine inline", "%matplotlib_of_mine"),
        ("out = !rm -rf data", "output of a command that may change something"),
        ("out = !ls $(rm x)", "output of a command that may change something"),
        ("for i in range(3):\n    out = !wget {i}", "wget"),
        ("%%bash\nfor i in 1 2; do python x.py $i; done", "not supported"),
        ("%cd missing", "no such folder"),
        ("!cd missing && ls", "no such folder"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(cell: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"n\.ipynb") as caught:
        run("open('ran', 'w').close()", cell)
    assert message in str(caught.value)
    assert Path("ran").exists() == ("no such folder" in message)


def test_steps_of_a_cell() -> None:
    cell = "a = 1\n!ls\n%env X 3\nb = !ls\nif a:\n    !pwd\n"
    Path("n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell}]}))
    steps = steps_of("n.ipynb")
    assert steps[:3] == [Source(0, "a = 1"), Line("ls", 0), Magic("env", "X 3", 0)]
    assert isinstance(steps[3], Source)
    assert len(steps) == 4
    assert "'ls', 0, True" in steps[3].text
    assert "'pwd', 0, False" in steps[3].text


@pytest.mark.parametrize(
    "line",
    ["a_name_of_many_letters.and_a_method(3)", "a, b, c, d, e, f, g, h, i, j, k", "a " * 40, "x[0][1][2][3] == 4"],
)
def test_long_names_are_read_at_once(line: str) -> None:
    """The pattern of an assignment took time exponential in the length of a name, so that notebooks never began."""
    Path("n.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": f"{line * 20}\n{line}\n"}]}))
    started = time.process_time()
    steps_of("n.ipynb")
    assert time.process_time() - started < 1


def test_several_targets_take_the_output_of_a_shell_line() -> None:
    run("box = [0, 0]\nbox[0], rest = !echo one; echo two\nassert (box[0], rest) == ('one', 'two')")


def test_a_cell_that_is_no_python_is_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)a cell is no Python.*n\.ipynb, cell \d, line 2"):
        run("good = 1\n  bad = 2")
