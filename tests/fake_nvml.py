"""A pynvml without a driver: GPUs, MIG slices, counters that grow with time, and functions that refuse.

`FakeNvml(real, gpus, refuse=...)` answers as the module `real` (the installed pynvml, which gives constants, structures and
error classes) would. Names in `refuse` raise NotSupported; `EVERY_READING` are all that give a reading of a found GPU.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

EVERY_READING = frozenset({
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetFieldValues", "nvmlDeviceGetComputeRunningProcesses",
    "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetComputeMode", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor",
})


@dataclass(eq=False)
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H200"
    memory: int = 141 * 2**30
    slices: list[tuple[str, int]] | None = None  # None: not in MIG mode
    pids: list[int] = field(default_factory=list)
    nvlink: float = 1000.0  # KiB/s; 0: the counter stands at 0
    gpm: float = 60.0
    number: int | None = None  # set on a MIG slice
    watts: float = 500.0


class FakeNvml:
    def __init__(self, real: Any, gpus: list[FakeGpu], refuse: frozenset[str] | set[str] = frozenset()) -> None:
        self._real, self._gpus, self._refuse = real, gpus, refuse
        self.opened = 0
        self._slices = {uuid: FakeGpu(uuid, gpu.name + " MIG 1g.18gb", gpu.memory // 8, number=number)
                        for gpu in gpus for uuid, number in gpu.slices or ()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            answer = object.__getattribute__(self, f"_{name}")
            return self._not_supported if name in self._refuse else answer
        return getattr(self._real, name)

    def _not_supported(self, *_: Any) -> None:
        raise self._real.NVMLError(self._real.NVML_ERROR_NOT_SUPPORTED)

    def _nvmlInit(self) -> None:
        self.opened += 1

    def _nvmlShutdown(self) -> None:
        self.opened -= 1

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def _nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def _nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._gpus[index]

    def _nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def _nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def _nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(gpu.slices is not None)] * 2

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, number: int) -> FakeGpu:
        if number >= len(gpu.slices or ()):
            raise self._real.NVMLError(self._real.NVML_ERROR_NOT_FOUND)
        return self._slices[gpu.slices[number][0]]

    def _nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        return gpu.number

    def _nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        return 0

    def _nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=gpu.memory, used=3 * 2**30)

    def _nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=99)

    def _nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return int(gpu.watts * 1000)

    def _nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return int(time.monotonic() * gpu.watts * 1000)

    def _nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        assert kind == self._real.NVML_CLOCK_SM
        return 1980

    def _nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return 51

    def _nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[tuple[int, int]]) -> list[Any]:
        answer = self._real.c_nvmlFieldValue_t()
        answer.fieldId, answer.scopeId = fields[0]
        answer.value.ullVal = int(time.monotonic() * gpu.nvlink)
        return [answer]

    def _nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]

    def _nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, index: int) -> int:
        linked = index == self._real.NVML_P2P_CAPS_INDEX_NVLINK and one.nvlink and other.nvlink
        return self._real.NVML_P2P_STATUS_OK if linked else self._real.NVML_P2P_STATUS_NOT_SUPPORTED

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: FakeGpu, other: FakeGpu) -> int:
        return self._real.NVML_TOPOLOGY_NODE

    def _nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(gpu.gpm > 0))

    def _nvmlGpmSampleAlloc(self) -> Any:
        return self._real.c_nvmlGpmSample_t()

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        pass

    def _nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> Any:
        assert gpu.number is None
        self._sampled = gpu
        return sample

    def _nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance: int, sample: Any) -> Any:
        assert gpu.number is None and isinstance(instance, int)
        self._sampled = gpu
        return sample

    def _nvmlGpmMetricsGet(self, request: Any) -> Any:
        wanted = {self._real.NVML_GPM_METRIC_SM_UTIL: self._sampled.gpm, self._real.NVML_GPM_METRIC_SM_OCCUPANCY: 25.0,
                  self._real.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 40.0}
        for slot in range(request.numMetrics):
            metric = request.metrics[slot]
            metric.nvmlReturn = 0 if metric.metricId in wanted else self._real.NVML_ERROR_NOT_SUPPORTED
            metric.value = wanted.get(metric.metricId, 0.0)
        return request
