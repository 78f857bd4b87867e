"""Links: which environment variables choose the wire between ranks, and how the ranks' environment is made.

A link only adds variables. Every inherited NCCL_*, TORCH_* and NVSHMEM_* variable reaches the ranks unchanged; one that
contradicts the link is an error, never overwritten, because the record would name a wire that was not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLES: dict[str, dict[str, str]] = {
    "none": {},
    "p2p": {},
    "p2p-nvls": {"NCCL_NVLS_ENABLE": "1"},
    "shm": {"NCCL_P2P_DISABLE": "1"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    "gloo": {},
    "shaped": {},  # the wire is shaped outside, by the operating system
}
# What must not be inherited with a value that turns the named wire off or into another.
UNSET = {"p2p": ("NCCL_P2P_DISABLE",), "p2p-nvls": ("NCCL_P2P_DISABLE",), "shm": ("NCCL_SHM_DISABLE",)}


class LinkError(ValueError):
    """The environment contradicts the link: one line naming the variable."""


def environment(
    link: str, inherited: Mapping[str, str], threads: int, gpus: Sequence[str] | None = None, deterministic: bool = False
) -> dict[str, str]:
    """The ranks' environment.

    threads: of each rank, whatever was inherited (their number moves losses in the eighth digit). gpus: uuids of the GPUs
    the ranks may use, None for all visible ones. deterministic: also fixes cuBLAS's workspace, which its deterministic
    algorithms need. Raises LinkError.
    """
    added = dict(VARIABLES[link])
    for name, value in added.items():
        if inherited.get(name, value) != value:
            raise LinkError(f"link {link} sets {name}={value}, but the environment has {name}={inherited[name]}")
    for name in UNSET.get(link, ()):
        if inherited.get(name, "0") not in ("", "0"):
            raise LinkError(f"link {link} contradicts {name}={inherited[name]} in the environment")
    if deterministic and "CUBLAS_WORKSPACE_CONFIG" not in inherited:
        added["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if gpus is not None:
        added["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**inherited, **added, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
