"""Devices to compile for that this machine need not have: chips of a TPU topology, or an H200."""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Chip(NamedTuple):
    """Peaks of one chip, as its maker states them."""

    flops: float  # a second, bfloat16
    bandwidth: float  # bytes a second
    memory: float  # bytes


# By the name that jax gives to a device.
CHIPS = {
    "TPU v5 lite": Chip(197e12, 819e9, 16e9),
    "TPU v5": Chip(459e12, 2765e9, 95e9),
    "TPU v6 lite": Chip(918e12, 1640e9, 32e9),
    "NVIDIA H200": Chip(989e12, 4.8e12, 141e9),
}
GPU = "h200"
# What XLA wants to know of a GPU that it cannot ask.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 143771000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""


def devices_of(topology: str) -> list[Any]:
    """The devices of a topology: "h200", which needs jax's CUDA plugin and nvcc, or a TPU's such as "v5e:2x2".

    To be called before jax computes anything, because it sets what XLA reads only then.

    Raises:
        ValueError: the packages are not installed.
    """
    # Neither jax nor libtpu is to look for a device.
    jax.config.update("jax_platforms", "cpu")
    if topology != GPU:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        if importlib.util.find_spec("libtpu") is None:
            raise ValueError(f"--topology {topology} needs libtpu as jax is built for; pip install 'jax[tpu]'.")
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    _point_to_cuda()
    named = {"platform": "cuda", "topology_name": "", "target_config": _H200, "topology": "1x1x1"}
    return list(topologies.get_topology_desc(**named).devices)


def _point_to_cuda() -> None:
    """Tells XLA where the compiler of GPU programs is: in packages, which it does not look through."""
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")
    if not found or importlib.util.find_spec("jax_cuda13_plugin") is None:
        packages = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc absl-py"
        raise ValueError(f"--topology {GPU} needs the compilers of the CUDA plugin; pip install {packages}.")
    folder = Path(next(iter(found.submodule_search_locations or [])))
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    flag = f"--xla_gpu_cuda_data_dir={folder}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
