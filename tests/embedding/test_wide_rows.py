"""Room beside a lookup's output: who gets it, what is joined in it, and what is left to torch.cat."""

import pytest
import torch

from viviane.config import SGD
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig, buffers
from viviane.embedding.buffers import Buffers, Margins, WideRows

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IDS = {"a": torch.tensor([3, 0, 8, 8]), "b": torch.tensor([1, 2, 2, 5])}


def collection(margins: Margins | None = None, **options) -> EmbeddingCollection:
    tables = [TableConfig(name=n, num_rows=9, dim=4, init="normal") for n in "ab"]
    own = EmbeddingCollection(tables, [FeatureConfig(name=n, table=n) for n in "ab"], SGD(), seed=1, **options)
    own.margins = margins
    return own


def test_a_gpu_leaves_room_only_where_rows_stay_whole_words() -> None:
    half = torch.bfloat16
    assert Margins(128, 0).applies(3328, half, GPU)
    assert Margins(8, 16).applies(24, half, GPU)
    for margins, width in ((Margins(13, 0), 416), (Margins(0, 13), 416), (Margins(4, 4), 16), (Margins(8, 0), 15)):
        assert not margins.applies(width, half, GPU)
        assert margins.applies(width, half, CPU)
    assert Margins(4, 0).applies(16, torch.float32, GPU)


def test_what_is_traced_has_no_room() -> None:
    seen = []

    def asked(x):
        seen.append(Margins(1, 1).applies(4, torch.float32, CPU))
        return x + 1

    torch.jit.trace(asked, torch.ones(1), check_trace=False)
    assert seen == [False]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_writes_between_the_margins(training, dtype) -> None:
    plain, own = (collection(m, output_dtype=dtype).train(training) for m in (None, Margins(3, 2)))
    out = own(IDS)
    assert torch.equal(out.flat, plain(IDS).flat)
    assert out.flat.stride() == (13, 1)
    assert not out.flat._is_view()
    assert torch.equal(out.stacked, plain(IDS).stacked)
    assert torch.equal(out["b"], plain(IDS)["b"])
    assert plain(IDS).wide is None
    for one, other in ((own, out), (plain, plain(IDS))):
        if training:
            other.flat.square().sum().backward()
            one.step(0.1)
    assert torch.equal(own.export_table("a").weight, plain.export_table("a").weight)


def test_room_is_used_once_and_only_by_what_fills_it() -> None:
    own = collection(Margins(3, 2))
    out = own(IDS)
    front, behind = torch.ones(4, 3), torch.zeros(4, 2)
    assert out.wide.join([out.flat, front, behind], 0) is None  # another order
    assert out.wide.join([front, out.flat], 1) is None
    assert out.wide.join([front, out.flat.clone(), behind], 1) is None  # not what the lookup wrote
    assert out.wide.join([front, own(IDS).flat, behind], 1) is None  # another lookup's
    assert out.wide.join([front, out.flat.view(4, 2, 4), behind], 1) is None
    assert out.wide.join([front, out.flat[:, :7], behind], 1) is None
    assert out.wide.join([front, out.flat.flip(0), behind], 1) is None
    whole = out.wide.join([front, out.flat, behind], 1)
    assert torch.equal(whole, torch.cat([front, out.flat, behind], 1))
    assert out.wide.join([front, out.flat, behind], 1) is None
    assert WideRows(Buffers(torch.float32), Margins(1, 1)).join([front, behind], 0) is None  # nothing was looked up


def test_what_is_put_beside_a_lookup_is_not_copied_again() -> None:
    own = collection(Margins(3, 2))
    out = own(IDS)
    front, more, behind = torch.ones(4, 1), torch.full((4, 2), 2.0), torch.full((4, 2), 3.0)
    for refused in (
        ([front], [behind]),
        ([behind], [front, more]),
        ([front, more.double()], [behind]),
        ([front, more], [behind[:3]]),
        ([front, more.unsqueeze(2)], [behind]),
    ):
        out.wide.put(*refused)
        assert not out.wide._put
    out.wide.put([front, more], [behind])
    whole = out.flat.as_strided((4, 13), (13, 1), 0)
    assert torch.equal(whole, torch.cat([front, more, out.flat, behind], 1))
    whole[:, 0] = 9.0
    whole[:, 11:] = 8.0
    other = behind.clone()  # what was put is known by the tensor that it was
    found = out.wide.join([front, more, out.flat, other], 2)
    assert torch.equal(found, torch.cat([torch.full((4, 1), 9.0), more, out.flat, other], 1))
    out.wide.put([front, more], [behind])  # there is no room any more
    assert torch.equal(found[:, 0], torch.full((4,), 9.0))


def test_history_is_right_whatever_is_written_beside() -> None:
    """Of a view of the rows, autograd would rebuild the history, since they are written to afterwards."""
    own = collection(Margins(3, 2))
    out, front, behind = own(IDS), torch.ones(4, 3, requires_grad=True), torch.zeros(4, 2)
    squares = out.flat.square()  # keeps the vectors, which are not written to
    name = type(out.flat.grad_fn).__name__
    whole = out.wide.join([front * 1, out.flat, behind], 1)
    assert type(out.flat.grad_fn).__name__ == name == "LookupBackward"
    assert type(whole.grad_fn).__name__ == "_JoinBackward"
    with torch.no_grad():
        truth = own.export_table("a").weight
    (squares.sum() + (whole * 3).sum()).backward()
    own.step(1.0)
    moved = truth[3] - own.export_table("a").weight[3]
    torch.testing.assert_close(moved, 2 * truth[3] + 3, rtol=1e-6, atol=1e-6)  # row 3 is looked up once
    assert torch.equal(front.grad, torch.full((4, 3), 3.0))


def test_the_joined_tensor_may_be_written_to() -> None:
    own = collection(Margins(3, 2))
    out, front = own(IDS), torch.ones(4, 3, requires_grad=True)
    whole = out.wide.join([front, out.flat, torch.zeros(4, 2)], 1)
    whole.mul_(2).sum().backward()
    assert torch.equal(front.grad, torch.full((4, 3), 2.0))


def test_other_types_are_left_to_cat_and_get_no_room_again() -> None:
    own = collection(Margins(3, 2))
    out = own(IDS)
    assert out.wide.join([torch.ones(4, 3, dtype=torch.float64), out.flat, torch.zeros(4, 2)], 1) is None
    again = own(IDS)
    assert again.wide is None
    assert again.flat.is_contiguous()


def test_an_empty_batch_is_left_to_cat() -> None:
    own = collection(Margins(3, 2))
    out = own({name: ids[:0] for name, ids in IDS.items()})
    assert out.wide.join([torch.ones(0, 3), out.flat, torch.zeros(0, 2)], 1) is None


def test_memory_is_used_again_when_nothing_refers_to_the_whole() -> None:
    buffers, places = Buffers(torch.float32), []
    for _ in range(3):
        wide = WideRows(buffers, Margins(128, 128))
        own = wide.take(1024, 256, CPU)
        whole = wide.join([torch.ones(1024, 128), own, torch.ones(1024, 128)], 1)
        places.append(whole.data_ptr())
        del own, wide
        assert buffers.take(1024, 512, CPU).data_ptr() != whole.data_ptr()
        del whole
    assert places[0] == places[1] == places[2]


def test_what_was_refused_is_recorded_as_it_ran_first(monkeypatch):
    """One step may be all that runs before a recording, and that had room: its kernels are there."""
    margins, device = Margins(8, 0), torch.device("cuda")
    monkeypatch.setattr(buffers, "is_capturing", lambda device: False)
    assert margins.applies(8, torch.float16, device)
    margins.refused.add(torch.float16)
    assert not margins.applies(8, torch.float16, device)
    monkeypatch.setattr(buffers, "is_capturing", lambda device: True)
    assert margins.applies(8, torch.float16, device)
