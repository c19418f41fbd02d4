"""The times of a simulated executor's steps and copies."""

from dataclasses import asdict, dataclass

from pagewise_shared.protocol import HOST

from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs


@dataclass(slots=True, frozen=True)
class DeviceCosts:
    """Seconds. ``prefill``: the costs that the scheduler's cost model has too. A step takes ``decode`` longer for each
    decoding sequence, and ``context`` for each token that decodes attend to."""

    prefill: Costs
    decode: float
    context: float

    def times_as_fast(self, speed: float) -> "DeviceCosts":
        """The costs of a device and links ``speed`` times as fast."""
        costs = asdict(self.prefill)
        tiers = {
            number: CopyCosts(**{name: value / speed for name, value in copies.items()})
            for number, copies in costs.pop("tiers").items()
        }
        prefill = Costs(**{name: value / speed for name, value in costs.items()}, tiers=tiers)
        return DeviceCosts(prefill, self.decode / speed, self.context / speed)


def modelled(
    *,
    parameters: float,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    flops: float,
    memory_bandwidth: float,
    link_bandwidth: float,
    peer_bandwidth: float = 10e9,
    bytes_per_value: int = 2,
) -> DeviceCosts:
    """Costs of a dense model from its shape and a device's rates (per second): a roofline, not a measurement.

    ``link_bandwidth``: to and from the host. ``peer_bandwidth``: from other executors.
    """
    kv_bytes = 2 * layers * kv_heads * head_dim * bytes_per_value
    block_on_link = block_size * kv_bytes / link_bandwidth
    weights = parameters * bytes_per_value / memory_bandwidth
    return DeviceCosts(
        prefill=Costs(
            step=weights,
            token=2 * parameters / flops,
            attention=4 * layers * heads * head_dim / flops,
            tiers={HOST: CopyCosts(1e-5, block_on_link, 1e-5, block_on_link)},
            fetch_block=block_size * kv_bytes / peer_bandwidth,
        ),
        decode=2 * parameters / flops,
        context=kv_bytes / memory_bandwidth,
    )


def llama_3_8b(block_size: int, link_bandwidth: float = 50e9, peer_bandwidth: float = 10e9) -> DeviceCosts:
    """Llama 3 8B in bf16 on a device of 400 TFLOP/s (effective) and 4 TB/s."""
    return modelled(
        parameters=8.03e9,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        block_size=block_size,
        flops=400e12,
        memory_bandwidth=4e12,
        link_bandwidth=link_bandwidth,
        peer_bandwidth=peer_bandwidth,
    )
