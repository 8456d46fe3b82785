"""One small working example of every registered layer: (name, parameters, input shapes without the batch)."""

import torch

from viviane.nn import EMPTY_ID, LAYERS, Loss, Rows, RowShape

EXAMPLES = [
    ("InnerProduct", {"num_output": 3}, [(5,)]),
    ("InnerProduct", {"num_output": 3}, [(2, 5)]),
    ("MLP", {"num_outputs": [4, 3]}, [(5,)]),
    ("MLP", {"num_outputs": [4, 1], "activations": ["relu", "none"], "layer_norm": True}, [(5,)]),
    ("MultiCross", {"num_layers": 3}, [(5,)]),
    ("MultiCross", {"num_layers": 2, "projection_dim": 3}, [(5,)]),
    ("MultiCross", {"num_layers": 2, "full_rank": True}, [(5,)]),
    ("FmOrder2", {"out_dim": 3}, [(9,)]),
    ("FmOrder2", {"out_dim": 3}, [(4, 3)]),
    ("WeightMultiply", {"weight_dims": [5, 2]}, [(5,)]),
    ("ElementwiseMultiply", {}, [(5,), (5,), (5,)]),
    ("Concat", {}, [(2,), (3,)]),
    ("Concat", {"axis": 2}, [(3, 2), (3, 1)]),
    ("Reshape", {"leading_dim": 6}, [(3, 2)]),
    ("Reshape", {"leading_dim": 2, "time_step": 3}, [(6,)]),
    ("Reshape", {"selected": [2, 0]}, [(3, 2)]),
    ("Reshape", {"shape": [2, -1]}, [(6,)]),
    ("Slice", {"ranges": [[0, 3], [2, 5]]}, [(5,)]),
    ("Dropout", {"dropout_rate": 0.3}, [(5,)]),
    ("ReLU", {}, [(5,)]),
    ("ELU", {"elu_alpha": 0.7}, [(5,)]),
    ("Sigmoid", {}, [(5,)]),
    ("Interaction", {}, [(3,), (4, 3)]),
    ("Interaction", {"pad": False}, [(3,), (1, 3)]),
    ("Interaction", {"pad": False}, [(5, 3)]),
    ("Add", {}, [(5,), (5,)]),
    ("Sub", {}, [(5,), (5,)]),
    ("ReduceSum", {}, [(3, 2)]),
    ("ReduceMean", {"axis": 2}, [(3, 2)]),
    ("BatchNorm", {}, [(5,)]),
    ("BatchNorm", {"factor": 0.3, "gamma_init_type": "Uniform"}, [(5,)]),
    ("LayerNorm", {}, [(2, 5)]),
    ("LayerNorm", {}, [(2, 3, 4)]),
    ("FusedInnerProduct", {"num_output": 3}, [(5,)]),
    ("FusedInnerProduct", {"num_output": 3, "act_type": "none", "pos_type": "tail"}, [(5,)]),
    ("GroupFusedInnerProduct", {"num_outputs": [4, 3], "last_act_type": "none"}, [(5,)]),
    ("DotProduct", {}, [(5,), (5,)]),
    ("Multiply", {"weight_dims": [5, 2]}, [(5,)]),
    ("ReLUHalf", {}, [(5,)]),
    ("Reshape", {"leading_dim": 2}, [(3, 4)]),
    ("Reshape", {"leading_dim": 12}, [RowShape((4,), Rows(3))]),
    ("Reshape", {"selected": True, "selected_slots": [1, 1]}, [(3, 2)]),
    ("Select", {"dim": 1, "index": [2, 0, 2]}, [(3, 2)]),
    ("Select", {"dim": 2, "index": [1]}, [(3, 2)]),
    ("Gather", {"indices": [0, 2, 0, 1]}, [(5,)]),
    ("Cast", {"dtype": "float32"}, [(5,)]),
    ("MatrixMultiply", {}, [(2, 3), (3, 4)]),
    ("MatrixMultiply", {}, [(2, 2, 3), (2, 3, 4)]),
    ("MatrixMultiply", {}, [(3,), (3, 4)]),
    ("MatrixMultiply", {}, [(3,), RowShape((4,), Rows(3, of_batch=False))]),
    ("MultiHeadAttention", {"num_attention_heads": 2}, [(3, 4)] * 3),
    ("MultiHeadAttention", {"num_attention_heads": 2}, [(2, 4), (3, 4), (3, 4), (1, 2, 3)]),
    ("MultiHeadAttention", {"num_attention_heads": 2, "scores": True}, [(3, 4)] * 3),
    ("MultiHeadAttention", {"transpose_b": True}, [(2, 3, 4), (2, 5, 4)]),
    ("MultiHeadAttention", {}, [(2, 3, 5), (2, 5, 4)]),
    ("SequenceMask", {"max_sequence_len_from": 3, "max_sequence_len_to": 4}, [(1,), (1,)]),
    ("SequenceMask", {"max_sequence_len": 3}, [(1,)]),
    ("Softmax", {}, [(5,)]),
    ("Softmax", {}, [(2, 5)]),
    ("Softmax", {"factor": 0.5}, [(2, 3, 4), (1, 1, 4)]),
    ("GRU", {"num_output": 3}, [(4, 2)]),
    ("GRU", {"num_output": 3, "SeqLength": 4, "vector_size": 2}, [(8,)]),
    ("PReLU_Dice", {"elu_alpha": 0.3}, [(5,)]),
    ("PReLU_Dice", {"elu_alpha": 0.3, "factor": 0.1}, [(5,)]),
    ("Scale", {"axis": 0, "factor": 3}, [(5,)]),
    ("Scale", {"axis": 1, "factor": 3}, [(5,)]),
    ("FusedReshapeConcat", {}, [(3, 2), (3, 1)]),
    ("FusedReshapeConcatGeneral", {}, [(3, 2), (3, 1)]),
    ("L2Normalize", {}, [(3, 4)]),
    ("LogFrequency", {"num_buckets": 7}, [(2,)]),
    ("MaskPlaces", {}, [(3, 2), (3,)]),
    ("LeakyReLU", {"slope": 0.2}, [(5,)]),
    ("MeanPlaces", {}, [(3, 2), (3,)]),
    ("TimeEmbedding", {"num_buckets": 3, "unit": 2}, [(4, 2), (4,)]),
    ("PairInnerProduct", {"num_output": 3}, [RowShape((2,), Rows(4)), (2,)]),
    ("PairInnerProduct", {"num_output": 1, "bias_init_type": "zero"}, [(3,), (3,)]),
    ("PositionEmbedding", {}, [(3, 2)]),
    ("PositionEmbedding", {}, [(3, 2), (3,)]),
    ("SampledSoftmax", {"temperature": 2.0}, [(4,), (4,), (1,)]),
    ("SampledSoftmax", {"temperature": 2.0}, [(4,), (3, 4), (3,), (3,)]),
    ("SampledSoftmax", {"temperature": 2.0, "in_batch": False}, [(4,), (3, 4), (3,), (3,)]),
    ("SampledSoftmaxLoss", {}, [(2,), (1,)]),
    ("SiLU", {}, [(5,)]),
    ("CausalMask", {}, [(4,)]),
    ("LastPlace", {}, [(4, 2), (4,)]),
    ("PointwiseAttention", {"num_attention_heads": 2}, [(4, 6), (4, 6), (4, 2), (4,)]),
    ("PointwiseAttention", {"num_buckets": 4, "unit": 3}, [(4, 3), (4, 3), (4, 2), (4,), (4,)]),
    ("NextItemSoftmax", {"temperature": 2.0}, [(3,), (3,), (2, 3), (5, 3), (5,), (5,), (5,)]),
    ("NextItemSoftmax", {"targets": "last"}, [(3,), (3,), (2, 3), (3, 3), (3,), (3,)]),
    (
        "NextItemSoftmax",
        {"candidates": "all", "first_item": 1},
        [(3,), (3,), (2, 3), (3, 3), (3,), (3,), RowShape((3,), Rows(4, of_batch=False))],
    ),
    ("BinaryCrossEntropyLoss", {}, [(1,), (1,)]),
    ("CrossEntropyLoss", {}, [(2,), (1,)]),
    ("CrossEntropyLoss", {}, [(5,), (1,)]),
    ("MultiCrossEntropyLoss", {"target_weight_vec": [1.0, 0.5, 2.0]}, [(3,), (3,)]),
    ("MeanSquaredErrorLoss", {}, [(1,), (1,)]),
]
IDS = [f"{name}-{index}" for index, (name, _, _) in enumerate(EXAMPLES)]
LOSSES = [name for name in LAYERS if issubclass(LAYERS[name], Loss)]


def rows_of_batch(shape, batch):
    rows = getattr(shape, "rows", Rows())
    return rows.count * (batch if rows.of_batch else 1)


MASKED = (
    ("Softmax", 2), ("MultiHeadAttention", 4), ("MaskPlaces", 2), ("MeanPlaces", 2), ("PositionEmbedding", 2),
    ("CausalMask", 1), ("LastPlace", 2),
)  # fmt: skip
MASK_AT = {"PointwiseAttention": 3, "NextItemSoftmax": 4}


def make_inputs(name, shapes, batch, dtype=torch.float64, seed=0):
    """Random inputs, away from 0, where ReLU has no derivative; masks, lengths and labels as they ought to be."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows_of_batch(shape, batch), *shape) for shape in shapes]
    made = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    made = [(x + 0.1 * x.sign()).to(dtype) for x in made]
    if name == "SequenceMask":
        return [(x * 3).round().clamp(0, 4) for x in made]
    for place in [one for one in LAYERS[name].id_inputs if one < len(made)]:
        made[place] = (made[place] * 2).round().long()  # some of them equal
        made[place].view(-1)[-1:] = EMPTY_ID if shapes[place][0] > 1 else 3
    if name == "TimeEmbedding":
        made[1] *= 7  # differences of several buckets, negative ones too
        made[1][0, 0] = EMPTY_ID
    if (name, len(shapes)) in MASKED:
        made[-1] = (made[-1] > 0).to(dtype)
    if name in MASK_AT:
        made[MASK_AT[name]] = (made[MASK_AT[name]] > 0).to(dtype)
    if name == "NextItemSoftmax":
        made[5] = made[5].clamp_min(0)
    if name in LOSSES:
        made[1] = (made[1] > 0).to(dtype)
    if name == "MultiCrossEntropyLoss":
        made[1][0, 0] = -1.0
    return made


def differentiable(name, given):
    """Inputs that have a gradient: not masks, lengths, labels."""
    if name in ("SequenceMask", "CausalMask", "LogFrequency"):
        return []
    if name == "SampledSoftmax":
        return [place for place in range(len(given)) if place != 2]
    if name in MASK_AT:  # masks and ids have none
        return [place for place in range(len(given)) if place not in (MASK_AT[name], *LAYERS[name].id_inputs)]
    fixed = name in LOSSES or name == "TimeEmbedding" or (name, len(given)) in MASKED
    return list(range(len(given) - fixed))
