"""Checkpoints: logical, verified, atomic; damage and other models are named and refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click_model import SCHEMA, ClickModel, assert_same_bits, make_batch, make_trainer, tensors_of
from safetensors import safe_open
from torch import nn

from viviane.config import SGD, AdaGrad, Solver
from viviane.core.errors import CheckpointError
from viviane.training import Trainer, read_manifest, verify_checkpoint, write_checkpoint
from viviane.training.checkpoint.store import CheckpointStore

SOLVER = Solver(batch_size=32, lr=0.02, device="cpu")


def trained(num_steps=3, **options):
    trainer = make_trainer(SOLVER, **options)
    for seed in range(num_steps):
        trainer.train_step(make_batch(16, seed))
    return trainer


def test_it_holds_named_tensors_and_comes_back_bit_by_bit(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "c")
    assert sorted(p.relative_to(tmp_path / "c").as_posix() for p in (tmp_path / "c").rglob("*") if p.is_file()) == [
        "dense.safetensors", "dense_optimizer.safetensors", "history.json", "manifest.json", "progress.safetensors",
        "tables/tables.item.safetensors", "tables/tables.user.safetensors",
    ]  # fmt: skip
    with safe_open(tmp_path / "c/tables/tables.user.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["state.m", "state.v", "weight"]
        assert torch.equal(file.get_tensor("weight"), trainer.module.tables.export_table("user").weight)
    with safe_open(tmp_path / "c/tables/tables.item.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["state.accumulator", "weight"]
    other = make_trainer(SOLVER)
    other.load_checkpoint(tmp_path / "c")
    assert_same_bits(tensors_of(trainer), tensors_of(other))
    assert other.step == 3
    # The next steps draw the same dropout, too: the generators' states came back.
    torch.manual_seed(99)
    other.load_checkpoint(tmp_path / "c")
    losses = [float(other.train_step(make_batch(16, 7))), float(other.train_step(make_batch(16, 8)))]
    trainer.load_checkpoint(tmp_path / "c")
    assert losses == [float(trainer.train_step(make_batch(16, 7))), float(trainer.train_step(make_batch(16, 8)))]
    assert_same_bits(tensors_of(trainer), tensors_of(other))


def test_no_file_is_a_pickle(tmp_path):
    trained().save_checkpoint(tmp_path / "c")
    for file in (tmp_path / "c").rglob("*"):
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.is_file():
            with safe_open(file, "pt") as opened:
                assert opened.keys()


FILES = ["manifest.json", "dense.safetensors", "dense_optimizer.safetensors", "tables/tables.user.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "altered"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path, name, damage):
    trained().save_checkpoint(tmp_path / "c")
    file = tmp_path / "c" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "longer":
        file.write_bytes(content + b"x")
    else:
        place = content.rindex(b'"step": 3') + 8 if name == "manifest.json" else len(content) - 3
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    other = make_trainer(SOLVER)
    before = tensors_of(other)
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(tmp_path / "c")
    assert str(file) in str(caught.value)
    words = {"missing": ("missing", "no checkpoint"), "longer": ("altered",)}.get(damage, (damage,))
    assert any(word in str(caught.value) for word in words), str(caught.value)
    if damage == "truncated" and name != "manifest.json":
        assert f"{len(content) // 2} bytes" in str(caught.value)
        assert f"{len(content)} bytes" in str(caught.value)
    assert_same_bits(before, tensors_of(other))
    assert other.step == 0


def test_another_format_version_says_which_release_wrote_it(tmp_path):
    trained().save_checkpoint(tmp_path / "c")
    manifest = tmp_path / "c/manifest.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "version": 5, "viviane": "9.1"}))
    with pytest.raises(
        CheckpointError, match=r"(?s)unsupported format version.*value:   5.*version 1 to 4.*viviane 9\.1"
    ):
        verify_checkpoint(tmp_path / "c")
    manifest.write_text(json.dumps({"format": "else"}))
    with pytest.raises(CheckpointError, match="not a checkpoint of Viviane"):
        verify_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        read_manifest(tmp_path / "none")


def test_another_model_is_refused_with_the_differences(tmp_path):
    trained().save_checkpoint(tmp_path / "c")
    other = make_trainer(SOLVER, hidden=16)
    before = tensors_of(other)
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(tmp_path / "c")
    text = str(caught.value)
    assert "net.0.weight: float32[8, 15] in the checkpoint, float32[16, 15] in the model" in text
    assert_same_bits(before, tensors_of(other))
    plain = Trainer(nn.Sequential(nn.Linear(3, 1)), SCHEMA, SOLVER, SGD(), progress=False)
    with pytest.raises(CheckpointError) as caught:
        plain.load_checkpoint(tmp_path / "c")
    assert "0.weight: only in the model, float32[1, 3]" in str(caught.value)
    assert "table tables.user: only in the checkpoint, float32[50, 4]" in str(caught.value)


def test_another_optimizer_is_refused_but_weights_load(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "c")
    other = Trainer(ClickModel(), SCHEMA, SOLVER, AdaGrad(), progress=False)
    before = tensors_of(other)
    with pytest.raises(
        CheckpointError, match=r"(?s)dense weights were trained with another optimizer.*m, v.*accumulator"
    ):
        other.load_checkpoint(tmp_path / "c")
    assert_same_bits(before, tensors_of(other))
    other.load_checkpoint(tmp_path / "c", weights_only=True)
    assert other.step == 0
    assert torch.equal(other.module.net[0].weight, trainer.module.net[0].weight)
    assert torch.equal(
        other.module.tables.export_table("user").weight, trainer.module.tables.export_table("user").weight
    )
    assert not other.module.tables.export_table("user").state["v"].any()


def test_weights_alone_predict_and_do_not_resume(tmp_path, valid):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "c", optimizer_state=False)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["dense.safetensors", "manifest.json", "tables"]
    other = make_trainer(SOLVER)
    with pytest.raises(CheckpointError, match=r"(?s)weights only.*weights_only=True"):
        other.load_checkpoint(tmp_path / "c")
    other.load_checkpoint(tmp_path / "c", weights_only=True)
    assert (other.predict(valid) == trainer.predict(valid)).all()


def test_an_sgd_run_keeps_its_step_counts(tmp_path):
    def make():
        model = ClickModel()
        return Trainer(model.net, SCHEMA, SOLVER, SGD(), loss=lambda z, b: z.sum(), progress=False)

    # A module without tables, with an optimizer without state.
    one, other = make(), make()
    one.module.forward = lambda batch: nn.Sequential.forward(one.module, torch.ones(4, 15))
    one.train_step(make_batch(4))
    one.save_checkpoint(tmp_path / "c")
    other.load_checkpoint(tmp_path / "c")
    assert_same_bits(tensors_of(one), tensors_of(other))
    assert other.stepper.optimizer.param_groups[0]["step"] == 1


def test_tied_parameters_half_types_and_scalars_come_back(tmp_path):
    class Odd(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.half_type = nn.Parameter(torch.full((2, 2), fill, dtype=torch.bfloat16))
            self.scalar = nn.Parameter(torch.tensor(fill))
            self.register_buffer("cut", torch.arange(6.0).reshape(2, 3).t() * fill)
            self.register_buffer("empty", torch.zeros(0, 4))
            self.register_buffer("fleeting", torch.tensor(fill), persistent=False)

    one, other = Odd(2.0), Odd(3.0)
    write_checkpoint(tmp_path / "c", one)
    from viviane.training import load_checkpoint

    load_checkpoint(tmp_path / "c", other)
    assert_equal = {n: torch.equal(t, other.state_dict()[n]) for n, t in one.state_dict().items()}
    assert all(assert_equal.values()), assert_equal
    assert other.b.weight is other.a.weight
    assert other.fleeting == 3.0


def test_extra_state_is_refused_rather_than_pickled(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"x": 1}

    with pytest.raises(CheckpointError, match="only a pickle could store"):
        write_checkpoint(tmp_path / "c", nn.Sequential(Extra(2, 2)))
    assert list(tmp_path.iterdir()) == []


def test_the_newest_and_the_best_stay(tmp_path):
    trainer = trained()
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in enumerate([0.5, 0.9, 0.6, None, 0.7, None], 1):
        place = trainer.place()
        place.step, place.values["score"] = step, score
        store.save(trainer.module, trainer.stepper.optimizer, place)
    assert store.steps() == [2, 5, 6]
    assert json.loads((tmp_path / "index.json").read_text()) == {
        "latest": "step-00000006",
        "best": {"folder": "step-00000002", "score": 0.9},
    }
    lower = CheckpointStore(tmp_path, keep=1, higher_is_better=False)
    assert lower.best_path() == tmp_path / "step-00000005"


@pytest.mark.parametrize("higher", [True, False])
def test_of_equal_scores_the_earlier_checkpoint_is_the_best(tmp_path, higher):
    trainer = trained()
    store = CheckpointStore(tmp_path, keep=9, higher_is_better=higher)
    for step in (1, 2, 3):
        place = trainer.place()
        place.step, place.values["score"] = step, 0.5
        store.save(trainer.module, trainer.stepper.optimizer, place)
    assert store.best_path() == tmp_path / "step-00000001"


def test_leftovers_that_are_ours_are_cleaned_and_others_stay(tmp_path):
    for name in (".step-00000004.abc.tmp", ".step-00000003.removed.old", ".mine.tmp", "step-notes"):
        (tmp_path / name).mkdir()
    (tmp_path / ".index.json.x1.tmp").write_text("")
    store = CheckpointStore(tmp_path, keep=2)
    store.clean()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.tmp", "step-notes"]
    assert store.steps() == []


def test_a_damaged_newest_is_skipped_and_said(tmp_path, caplog):
    trainer, store = trained(), CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        place = trainer.place()
        place.step = step
        store.save(trainer.module, trainer.stepper.optimizer, place)
    (tmp_path / "step-00000002/dense.safetensors").write_bytes(b"")
    assert store.latest_whole() == tmp_path / "step-00000001"
    assert "step-00000002/dense.safetensors" in caplog.text
    (tmp_path / "step-00000001/manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"(?s)truncated.*step-00000002/dense"):
        store.latest_whole()


def test_a_full_disk_keeps_the_old_checkpoint_and_the_training_state(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root and permission to mount")
    try:
        trainer = trained()
        trainer.save_checkpoint(mount / "c")
        (mount / "ballast").write_bytes(b"x" * (shutil.disk_usage(mount).free - 20_000))
        trainer.train_step(make_batch(16, 5))
        before = tensors_of(trainer)
        with pytest.raises(CheckpointError) as caught:
            trainer.save_checkpoint(mount / "c")
        text = str(caught.value)
        assert "the disk is full" in text
        assert str(mount / "c") in text
        assert "bytes needed" in text
        assert "free" in text
        assert_same_bits(before, tensors_of(trainer))
        assert verify_checkpoint(mount / "c").step == 3
        assert sorted(p.name for p in mount.iterdir()) == ["ballast", "c"]
        (mount / "ballast").unlink()
        trainer.save_checkpoint(mount / "c")
        assert verify_checkpoint(mount / "c").step == 4
    finally:
        subprocess.run(["umount", mount], check=True)


def test_fit_stops_when_a_checkpoint_cannot_be_written(tmp_path, data, warm):
    code = (
        "import resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from click_model import *; from viviane.training import Callback\n"
        "class Limit(Callback):\n"
        "    def on_step_end(self, step, loss):\n"
        "        if step == 6: resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "solver = Solver(batch_size=32, checkpoint_every=5, device='cpu')\n"
        "trainer = make_trainer(solver, hidden=200, run_folder=sys.argv[2], callbacks=[Limit()])\n"
        "trainer.fit(Dataset(Path(sys.argv[1]) / 'train'))\n"
    )
    done = warm.run(["-c", code, data, tmp_path / "run", Path(__file__).parent], cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "CheckpointError: the checkpoint could not be written: the file exceeds the file system's size limit"
        in done.stderr
    )
    assert "step-00000010" in done.stderr
    assert "bytes needed" in done.stderr
    assert "resume=True" in done.stderr
    assert CheckpointStore(tmp_path / "run/checkpoints", 2).steps() == [5]
    assert verify_checkpoint(tmp_path / "run/checkpoints/step-00000005").step == 5


def test_writing_a_large_table_takes_no_second_copy(tmp_path):
    code = (
        "import resource, sys; from viviane.embedding import *; from viviane.config import *\n"
        "from viviane.training import write_checkpoint, load_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "table = TableConfig(name='t', num_rows=500_000, dim=32)\n"  # 61 MiB, 122 MiB with AdaGrad's state
        "emb = EmbeddingCollection([table], [FeatureConfig(name='t', table='t')], AdaGrad())\n"
        "import safetensors.torch; before = peak(); write_checkpoint(sys.argv[1], emb); print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, check=True)
    # A copy of the weights alone would be 61 MiB; reading back for the check sum goes in small pieces.
    assert float(done.stdout) < 20
