"""Linear layers with the same input as one, in a model of OpenVINO.

The projections to Q, K and V read the same hidden states, and so do two of a gated MLP. As one product each, they begin
and end fewer parallel regions. ``docs/performance.md`` says what that saves: a part of a step of few sequences, more of
it where other processes take turns on the cores, nothing where steps are large.
"""

from collections import defaultdict

import numpy as np
import openvino as ov
import openvino.opset13 as ops

from pagewise_executor.models.openvino_int8 import linear_weight


def merge_products(model: ov.Model) -> int:
    """Compute linear layers of the same input in one product, which is then split; return how many fewer there are."""
    readers: dict[tuple[str, int], list[ov.Node]] = defaultdict(list)
    for node in model.get_ordered_ops():
        if linear_weight(node) is not None:
            source = node.input_value(0)
            readers[source.get_node().get_friendly_name(), source.get_index()].append(node)
    together = [nodes for nodes in readers.values() if len(nodes) > 1]
    for nodes in together:
        weights = [weight for node in nodes if (weight := linear_weight(node)) is not None]
        product = ops.matmul(nodes[0].input_value(0), ops.constant(np.concatenate(weights)), False, True)
        last_axis = len(product.output(0).get_partial_shape()) - 1
        split = ops.variadic_split(product, last_axis, np.array([len(weight) for weight in weights]))
        for node, output in zip(nodes, split.outputs(), strict=True):
            node.output(0).replace(output)
    model.validate_nodes_and_infer_types()
    return sum(len(nodes) - 1 for nodes in together)
