"""A float64 collection with dense tables and autograd, one bag at a time: what the real one must equal."""

import torch

from viviane.batch import Bag
from viviane.ops.rules import rule_of


class DenseTruth:
    """Same tables, features and rule as an EmbeddingCollection; keys in range or by `resolve`."""

    def __init__(self, collection):
        self.features = collection.features
        self.tables = collection.tables
        self.rules = {n: t.optimizer or collection.optimizer for n, t in self.tables.items()}
        self.weight = {n: collection.export_table(n).weight.double() for n in self.tables}
        self.state = {n: {k: s.double() for k, s in collection.export_table(n).state.items()} for n in self.tables}
        self.steps = dict.fromkeys(self.tables, 0)
        self.touched = {n: set() for n in self.tables}
        self.leaves = {}

    def forward(self, batch: dict[str, Bag]) -> torch.Tensor:
        self.leaves = {n: w.clone().requires_grad_() for n, w in self.weight.items()}
        self.touched = {n: set() for n in self.tables}
        nothing = sum(0 * leaf.sum() for leaf in self.leaves.values())  # gives every table a gradient, if of zeros
        return torch.cat([self._feature(f, batch[f.name]) for f in self.features.values()], 1) + nothing

    def _feature(self, feature, bag):
        table, weight = self.tables[feature.table], self.leaves[feature.table]
        rows = []
        for b in range(len(bag.offsets) - 1):
            vectors, factors = [], []
            for n in range(int(bag.offsets[b]), int(bag.offsets[b + 1])):
                key, w = int(bag.values[n]), 1.0 if bag.weights is None else float(bag.weights[n])
                padding = table.padding_id is not None and key == table.padding_id
                if not padding:
                    self.touched[feature.table].add(key)
                vectors.append(torch.zeros(table.dim, dtype=torch.float64) if padding else weight[key] * w)
                factors.append(0.0 if padding else w)
            if feature.combiner == "concat":
                vectors += [torch.zeros(table.dim, dtype=torch.float64)] * (feature.num_places - len(vectors))
                rows.append(torch.cat(vectors))
                continue
            total = sum(vectors, torch.zeros(table.dim, dtype=torch.float64))
            if feature.combiner == "mean":
                total = total / sum(factors) if sum(factors) else total * 0
            rows.append(total)
        return torch.stack(rows)

    def step(self, lr):
        for name, rule in self.rules.items():
            if not any(f.table == name for f in self.features.values()):
                continue
            self.steps[name] += 1
            grad = self.leaves[name].grad
            everything = getattr(rule, "update", "local") == "global"
            for row in range(len(grad)) if everything else sorted(self.touched[name]):
                self._row(name, row, grad[row], lr, rule)

    def _row(self, name, row, grad, lr, rule):
        """One row by the reference's arithmetic, which has tests of its own with numbers worked out by hand."""
        w, own = self.weight[name], {part: state[row : row + 1] for part, state in self.state[name].items()}
        g = grad * min(1.0, rule.clip_row_norm / float(grad.norm())) if rule.clip_row_norm and grad.any() else grad
        arithmetic = rule_of(rule)
        g = (g + arithmetic.decay * w[row]).unsqueeze(0)
        w[row] = arithmetic.update(w[row : row + 1], g, own, lr, self.steps[name])
        for part, state in own.items():
            self.state[name][part][row] = state[0]
