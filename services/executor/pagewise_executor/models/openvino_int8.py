"""Weights in eight bits for a model of OpenVINO."""

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops


def quantise_weights(model: ov.Model) -> int:
    """Replace the weights of all linear layers by eight bits with a scale per output; return how many there are.

    Each output's largest weight becomes 127 or -127. OpenVINO keeps such weights as they are, and rounds inputs of
    these layers to eight bits too, in groups of 32 with a scale each.
    """
    count = 0
    for node in model.get_ops():
        if (weight := linear_weight(node)) is None:
            continue
        scales = np.abs(weight).max(axis=1, keepdims=True) / 127
        scales[scales == 0] = 1
        rounded = ops.convert(ops.constant(np.rint(weight / scales).astype(np.int8)), "f32")
        product = ops.matmul(node.input_value(0), ops.multiply(rounded, ops.constant(scales)), False, True)
        node.output(0).replace(product.output(0))
        count += 1
    model.validate_nodes_and_infer_types()
    return count


def linear_weight(node: Any) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]] | None":
    """Return the weight [out, in] of a linear layer; None: this is none."""
    if node.get_type_name() != "MatMul" or (settings := node.get_attributes())["transpose_a"]:
        return None
    constant = node.input_value(1).get_node()
    if constant.get_type_name() != "Constant" or constant.data.ndim != 2 or constant.data.dtype != np.float32:
        return None
    weight: np.ndarray[tuple[int, int], np.dtype[np.float32]] = constant.data
    return weight if settings["transpose_b"] else weight.T
