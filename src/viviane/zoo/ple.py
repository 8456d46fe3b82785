"""Progressive Layered Extraction: experts of each label's own beside shared ones, in layers."""

from __future__ import annotations

from pydantic import Field

from viviane.model.nodes import Node
from viviane.schema import Schema
from viviane.zoo.multitask import MultiTaskModel, mixture
from viviane.zoo.recipe import ZOO


@ZOO.register("ple")
class PLE(MultiTaskModel):
    """Progressive Layered Extraction; with one level it is the paper's CGC.

        x_k = x_s = [e_1, ..., e_S, dense]                        at level 1, for each label k and the shared part s
        F_k = experts of label k on x_k;  F_s = shared experts on x_s
        x_k <- sum over F_k and F_s, weighted by softmax(W_k x_k)
        x_s <- sum over all experts, weighted by softmax(W_s x_s)       not at the last level, where nothing reads it
        out_k = w_k . MLP_k(x_k) + b_k

    Source: Tang et al. 2020, "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for Personalized
    Recommendations".

    Args:
        num_levels: number of extraction levels.
        num_experts: experts of each label, at each level.
        num_shared_experts: shared experts, at each level.
        expert_mlp: widths of each expert.

    Example:
        >>> labels = [{"name": "click"}, {"name": "buy"}]
        >>> schema = Schema(labels=labels, categorical=[{"name": "c", "num_ids": 9}])
        >>> [node.name for node in PLE(num_levels=1, num_experts=1, num_shared_experts=1).nodes(schema)[3:6]]
        ['level0_click_0', 'level0_buy_0', 'level0-shared_0']
    """

    num_levels: int = Field(default=2, ge=1)
    num_experts: int = Field(default=2, ge=1)
    num_shared_experts: int = Field(default=2, ge=1)
    expert_mlp: tuple[int, ...] = Field(default=(128, 64), min_length=1)

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        nodes, x, tasks = self.start(schema)
        own, shared = dict.fromkeys(tasks, x), x  # what each label's part and the shared part read
        for level in range(self.num_levels):
            experts: dict[str, list[str]] = {}
            for task in tasks:
                experts[task] = [f"level{level}_{task}_{e}" for e in range(self.num_experts)]
                nodes += [self.mlp(name, own[task], self.expert_mlp) for name in experts[task]]
            # A hyphen, so that a label may be called "shared".
            common = [f"level{level}-shared_{e}" for e in range(self.num_shared_experts)]
            nodes += [self.mlp(name, shared, self.expert_mlp) for name in common]
            gates = {task: (own[task], [*experts[task], *common]) for task in tasks}
            for task, (gate_input, mixed) in gates.items():
                own[task] = f"mix{level}_{task}"
                nodes += mixture(own[task], gate_input, mixed, self.expert_mlp[-1])
            if level < self.num_levels - 1:
                everything = [name for task in tasks for name in experts[task]] + common
                nodes += mixture(f"mix{level}-shared", shared, everything, self.expert_mlp[-1])
                shared = f"mix{level}-shared"
        return [*nodes, *self.towers(schema, list(own.values()))]
