"""The GPUs that can be stood in for."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """What CUDA tells of a GPU, from its maker's pages."""

    name: str
    capability: int  # 10 times the compute capability
    multiprocessors: int
    mib: int  # of memory
    memory_khz: int
    bus_bits: int
    devices: int = 1


GPUS = {
    "sm_75": Gpu("Tesla T4", 75, 40, 15360, 5001000, 256),
    "sm_80": Gpu("NVIDIA A100-SXM4-40GB", 80, 108, 40536, 1215000, 5120),
    "sm_89": Gpu("NVIDIA GeForce RTX 4090", 89, 128, 24564, 10501000, 384),
    "sm_90": Gpu("NVIDIA H100 80GB HBM3", 90, 132, 81559, 2619000, 5120),
}
