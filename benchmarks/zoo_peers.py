"""The zoo's models as a PyTorch user writes them, and those of DeepCTR-Torch, for `zoo_cpu`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import viviane as vv
from viviane.batch import Batch

Step = Callable[[], object]
DIM, DEEP, LR = 16, (256, 128), 1e-3


@dataclass(frozen=True)
class Case:
    """A model and the columns it is given.

    Args:
        plain: makes the hand-written network from the tables' maker.
        deepctr: the model's name in DeepCTR-Torch, where it has it.
        heavy: the tables take most of the step.
        loss: what the hand-written network's output is compared with the labels by.
    """

    name: str
    recipe: Any
    plain: Callable[[Callable[..., nn.Embedding], Case], nn.Module]
    columns: int = 26
    dense: int = 13
    history: int = 0
    labels: int = 1
    deepctr: str = ""
    heavy: bool = True
    loss: Callable[[Tensor, Tensor], Tensor] = F.binary_cross_entropy_with_logits


def chain(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    steps: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        steps += [nn.Linear(a, b), act()]
    return nn.Sequential(*steps)


class Fields(nn.Module):
    """One table for each column."""

    def __init__(self, table: Callable[..., nn.Embedding], columns: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(table(dim) for _ in range(columns))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([one(ids[:, i]) for i, one in enumerate(self.tables)], 1)


class Plain(nn.Module):
    """What the hand-written models of many columns share: vectors, x = [vectors, dense], a deep network."""

    def __init__(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().__init__()
        self.fields = Fields(table, case.columns, DIM)
        self.width = case.columns * DIM + case.dense
        self.deep = chain(self.width, *DEEP)
        self.build(table, case)

    def build(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        self.out = nn.Linear(DEEP[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vectors = self.fields(ids)
        return self.logit(dense, ids, vectors, torch.cat([vectors.flatten(1), dense], 1))

    def logit(self, dense: Tensor, ids: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class WideDeep(Plain):
    def build(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        self.wide, self.wide_dense, self.out = (
            Fields(table, case.columns, 1),
            nn.Linear(case.dense, 1),
            nn.Linear(DEEP[-1], 1),
        )

    def logit(self, dense: Tensor, ids: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        return self.wide(ids).sum(1) + self.wide_dense(dense) + self.out(self.deep(x))


class DeepFM(WideDeep):
    def build(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().build(table, case)
        self.numbers = nn.Parameter(torch.randn(case.dense, DIM) * 0.01)
        self.deep = chain((case.columns + case.dense) * DIM, *DEEP)

    def logit(self, dense: Tensor, ids: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        v = torch.cat([vectors, dense.unsqueeze(2) * self.numbers], 1)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        return self.wide(ids).sum(1) + self.wide_dense(dense) + pairs + self.out(self.deep(v.flatten(1)))


class DCN(Plain):
    def build(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        self.cross = nn.ModuleList(nn.Linear(self.width, 1, bias=False) for _ in range(3))
        self.bias = nn.ParameterList(torch.zeros(self.width) for _ in range(3))
        self.out = nn.Linear(self.width + DEEP[-1], 1)

    def logit(self, dense: Tensor, ids: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        y = x
        for layer, bias in zip(self.cross, self.bias, strict=True):
            y = x * layer(y) + bias + y
        return self.out(torch.cat([y, self.deep(x)], 1))


class DCNv2(Plain):
    def build(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        self.cross = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(3))
        self.out = nn.Linear(self.width + DEEP[-1], 1)

    def logit(self, dense: Tensor, ids: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        y = x
        for layer in self.cross:
            y = x * layer(y) + y
        return self.out(torch.cat([y, self.deep(x)], 1))


class MMoE(Plain):
    def build(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        del self.deep
        self.experts = nn.ModuleList(chain(self.width, 128, 64) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(self.width, 4) for _ in range(case.labels))
        self.towers = nn.ModuleList(nn.Sequential(chain(64, 64), nn.Linear(64, 1)) for _ in range(case.labels))

    def logit(self, dense: Tensor, ids: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
        found = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = [(gate(x).softmax(1).unsqueeze(1) @ found).squeeze(1) for gate in self.gates]
        return torch.cat([tower(one) for tower, one in zip(self.towers, mixed, strict=True)], 1)


class DLRM(nn.Module):
    def __init__(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().__init__()
        self.fields, places = Fields(table, case.columns, DIM), case.columns + 1
        self.bottom = chain(case.dense, 256, 64, DIM)
        rows, columns = torch.tril_indices(places, places, -1)
        self.register_buffer("lower", rows * places + columns)
        self.top = nn.Sequential(chain(DIM + places * (places - 1) // 2, *DEEP), nn.Linear(DEEP[-1], 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        z = torch.cat([first.unsqueeze(1), self.fields(ids)], 1)
        # index_select: its backward is faster than that of indexing with two lists, as DLRM's authors wrote it.
        pairs = torch.bmm(z, z.transpose(1, 2)).flatten(1).index_select(1, self.lower)
        return self.top(torch.cat([first, pairs], 1))


class TwoTower(nn.Module):
    """Half of the columns are the user's, half the item's, whose first is its id; returns log p of each row's item."""

    def __init__(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().__init__()
        self.half = case.columns // 2
        self.user_fields, self.item_fields = (Fields(table, self.half, DIM) for _ in range(2))
        self.user, self.item = (nn.Sequential(chain(self.half * DIM, 128), nn.Linear(128, 32)) for _ in range(2))
        rows = table(1).num_embeddings
        self.register_buffer("interval", torch.zeros(rows))
        self.register_buffer("last_seen", torch.zeros(rows))
        self.steps = 0

    def log_frequency(self, items: Tensor) -> Tensor:
        """Return log q by the mean number of steps between two batches with an item."""
        self.steps += 1
        old, gap = self.interval[items], self.steps - self.last_seen[items]
        self.interval[items] = torch.where(old > 0, old + 0.01 * (gap - old), gap)
        self.last_seen[items] = self.steps
        return -self.interval[items].clamp_min(1.0).log()

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        u = F.normalize(self.user(self.user_fields(ids[:, : self.half]).flatten(1)))
        v = F.normalize(self.item(self.item_fields(ids[:, self.half :]).flatten(1)))
        items = ids[:, self.half]
        with torch.no_grad():
            log_q = self.log_frequency(items)
            same = (items == items.unsqueeze(1)).fill_diagonal_(False)
        z = torch.addmm(-log_q, u / 0.1, v.T).masked_fill_(same, -torch.inf)
        return z.diagonal() - z.logsumexp(1)


def weighted_mean(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of log p of each row's item: rows of label 0 only give candidates."""
    return -(log_p * labels[:, 0]).mean()


class NeuMF(nn.Module):
    def __init__(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().__init__()
        self.gmf, self.mlp_fields = Fields(table, 2, DIM), Fields(table, 2, DIM)
        self.mlp, self.out = chain(2 * DIM, 64, 32, 16), nn.Linear(DIM + 16, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        product = self.gmf(ids).prod(1)
        return self.out(torch.cat([product, self.mlp(self.mlp_fields(ids).flatten(1))], 1))


class Dice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(x).sigmoid()


class DIN(nn.Module):
    def __init__(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().__init__()
        self.table = table(DIM)
        self.unit = nn.Sequential(nn.Linear(4 * DIM, 80), Dice(80), nn.Linear(80, 40), Dice(40), nn.Linear(40, 1))
        self.top = nn.Sequential(nn.Linear(2 * DIM, 200), Dice(200), nn.Linear(200, 80), Dice(80), nn.Linear(80, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        h, t = self.table(history), self.table(item)
        wide = t.unsqueeze(1).expand_as(h)
        x = torch.cat([h, wide, h - wide, h * wide], 2)
        a = self.unit(x.flatten(0, 1)).view(history.shape)
        return self.top(torch.cat([(a.unsqueeze(1) @ h).squeeze(1), t], 1))


class BST(nn.Module):
    def __init__(self, table: Callable[..., nn.Embedding], case: Case) -> None:
        super().__init__()
        places = case.history + 1
        self.table, self.place = table(DIM), nn.Parameter(torch.randn(places, DIM) * 0.02)
        self.block = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, F.leaky_relu, batch_first=True)
        self.top = nn.Sequential(chain(places * DIM, 256, 128, act=nn.LeakyReLU), nn.Linear(128, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        ids = torch.cat([history, item[:, None]], 1)
        return self.top(self.block(self.table(ids) + self.place).flatten(1))


def plain_steps(case: Case, rows: int, batches: list[Batch], *, sparse: bool) -> list[Step]:
    """Return a training step for each batch: Adam, with SparseAdam for the tables where gradients are sparse."""
    torch.manual_seed(0)

    def table(dim: int) -> nn.Embedding:
        made = nn.Embedding(rows, dim, sparse=sparse)
        nn.init.uniform_(made.weight, -0.01, 0.01)
        return made

    model = case.plain(table, case)
    tables = [one.weight for one in model.modules() if isinstance(one, nn.Embedding)]
    known = {id(one) for one in tables}
    rest = [one for one in model.parameters() if id(one) not in known]
    rules: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=LR)]
    rules.append(torch.optim.SparseAdam(tables, lr=LR) if sparse else torch.optim.Adam(tables, lr=LR))

    def step(first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
        loss = case.loss(model(first, second), labels)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for rule in rules:
            rule.step()
        return loss.detach()

    inputs = [(*_inputs(case, one), one.labels) for one in batches]
    return [lambda given=given: step(*given) for given in inputs]


def _inputs(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    if case.history:
        return batch.bags["history"].values.view(-1, case.history).long(), batch.one_hot[:, 0].long()
    return batch.dense, batch.one_hot.long()


def deepctr_steps(case: Case, rows: int, batches: list[Batch]) -> list[Step] | None:
    """Return the same of DeepCTR-Torch's model, or None where it is not installed or has no such model."""
    if not case.deepctr:
        return None
    try:
        from deepctr_torch import inputs, models
    except ImportError:
        return None
    zero = {"l2_reg_embedding": 0.0, "l2_reg_dnn": 0.0}
    if case.history:
        item = inputs.SparseFeat("item", rows, DIM)
        past = inputs.VarLenSparseFeat(inputs.SparseFeat("hist_item", rows, DIM, embedding_name="item"), case.history,
                                       length_name="length")  # fmt: skip
        sizes = {
            "dnn_hidden_units": (200, 80),
            "att_hidden_size": (80, 40),
            "dnn_activation": "relu",
        }  # its dice refuses the top network
        model = models.DIN([item, past], ["item"], **sizes, **zero, att_activation="dice")
    else:
        fields: list[Any] = [inputs.SparseFeat(f"c{n}", rows, DIM) for n in range(case.columns)]
        fields += [inputs.DenseFeat(f"x{n}", 1) for n in range(case.dense)]
        wide = {"l2_reg_linear": 0.0, "dnn_hidden_units": DEEP, **zero}
        more = {"cross_num": 3, "cross_parameterization": case.deepctr[4:], "l2_reg_cross": 0.0}
        model = getattr(models, case.deepctr[:3] if "DCN" in case.deepctr else case.deepctr)(
            fields, fields, **wide, **(more if "DCN" in case.deepctr else {})
        )
    rule = torch.optim.Adam(model.parameters(), lr=LR)
    places = {name: place[0] for name, place in model.feature_index.items()}

    def rows_of(batch: Batch) -> Tensor:
        first, second = _inputs(case, batch)
        if not case.history:
            return torch.cat([second.float(), first], 1)
        columns = {"item": second[:, None], "hist_item": first, "length": torch.full((batch.size, 1), case.history)}
        return torch.cat([columns[name].float() for name in sorted(places, key=lambda name: places[name])], 1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.binary_cross_entropy(model(x), labels)
        rule.zero_grad(set_to_none=True)
        loss.backward()
        rule.step()
        return loss.detach()

    model.train()
    given = [(rows_of(one), one.labels) for one in batches]
    np.testing.assert_equal(given[0][0].shape[1], sum(b - a for a, b in model.feature_index.values()))
    return [lambda pair=pair: step(*pair) for pair in given]


CASES = [
    Case("Wide & Deep", vv.zoo.WideDeep(dim=DIM, deep_mlp=DEEP), WideDeep, deepctr="WDL"),
    Case("DeepFM", vv.zoo.DeepFM(dim=DIM, deep_mlp=DEEP), DeepFM, deepctr="DeepFM"),
    Case("DCN", vv.zoo.DCN(dim=DIM, deep_mlp=DEEP), DCN, deepctr="DCN vector"),
    Case("DCN v2", vv.zoo.DCNv2(dim=DIM, deep_mlp=DEEP), DCNv2, deepctr="DCN matrix", heavy=False),
    Case("DLRM", vv.zoo.DLRM(dim=DIM, top_mlp=DEEP), DLRM),
    Case("MMoE", vv.zoo.MMoE(dim=DIM), MMoE, labels=2, heavy=False),
    Case("NeuMF", vv.zoo.NCF(dim=DIM, user="c0", item="c1"), NeuMF, columns=2, dense=0),
    Case(
        "Two towers",
        vv.zoo.TwoTower(dim=DIM, user=[f"c{n}" for n in range(4)], item=[f"c{n}" for n in range(4, 8)]),
        TwoTower,
        columns=8,
        dense=0,
        heavy=False,
        loss=weighted_mean,
    ),
    Case("DIN", vv.zoo.DIN(dim=DIM), DIN, columns=1, dense=0, history=20, deepctr="DIN", heavy=False),
    Case("BST", vv.zoo.BST(dim=DIM), BST, columns=1, dense=0, history=20, heavy=False),
]
