"""Folders of adapters without torch: only their names, shapes and bytes matter."""

import json
from pathlib import Path
from typing import Any


def write_adapter(folder: Path, *, rank: int = 4, fill: int = 0, **settings: Any) -> Path:
    """Write an adapter of one layer, whose weights are bytes of this value. ``settings``: of its configuration."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in (("A", [rank, 48]), ("B", [48, rank])):
        size = 4 * shape[0] * shape[1]
        key = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{name}.weight"
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    weights = len(text).to_bytes(8, "little") + text + bytes([fill]) * end
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder
