"""NVIDIA's management library (NVML) behind one class: the only file that calls pynvml (nvidia-ml-py 13.615.71 tried).

Every call gives a value or raises `NoReading` with NVML's own words. `Nvml(binding)` takes anything that looks like the
pynvml module, so that tests need no GPU. Imports no torch.

One source for each quantity:

    utilization   %      nvmlDeviceGetUtilizationRates: share of the last 1/6 to 1 s in which any kernel was resident
    memory_used   B      nvmlDeviceGetMemoryInfo
    power         W      nvmlDeviceGetPowerUsage (the driver's average over up to 1 s)
    energy        mJ     nvmlDeviceGetTotalEnergyConsumption, a counter since the driver was loaded
    clock         MHz    nvmlDeviceGetClockInfo of the SMs
    temperature   C      nvmlDeviceGetTemperature
    nvlink_rx/tx  B      field values NVLINK_THROUGHPUT_DATA_RX/TX over all links, counters without protocol overhead
    sm_active ... %      GPM (Hopper and later): averages between two samples of this process
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ALL_LINKS = 0xFFFFFFFF  # scope of a field value: the sum over the GPU's links
GPM = {"sm_active": "SM_UTIL", "sm_occupancy": "SM_OCCUPANCY", "tensor_active": "ANY_TENSOR_UTIL", "dram_active": "DRAM_BW_UTIL"}
COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
LEVELS = {0: "board", 10: "switch", 20: "switches", 30: "host-bridge", 40: "node", 50: "system"}


class NoReading(RuntimeError):
    """NVML gave no value; the text says why."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG slice of `parent` with its GPU instance's number."""

    handle: Any
    index: int
    uuid: str
    parent: Device | None = None
    instance: int | None = None


class Nvml:
    """An open NVML. Raises NoReading where there is no driver, no library or no binding."""

    def __init__(self, binding: Any = None) -> None:
        if binding is None:
            try:
                import pynvml as binding
            except ImportError:
                raise NoReading("the package nvidia-ml-py is not installed") from None
        self.binding = binding
        self._ask("nvmlInit")

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def driver(self) -> str:
        return self._ask("nvmlSystemGetDriverVersion")

    def cuda(self) -> str:
        """The newest CUDA version that the driver runs, as 13.0."""
        version = self._ask("nvmlSystemGetCudaDriverVersion")
        return f"{version // 1000}.{version % 1000 // 10}"

    def devices(self) -> list[Device]:
        """All GPUs that the driver shows, in PCI order; those lost to an error are left out."""
        found = []
        for index in range(self._ask("nvmlDeviceGetCount")):
            try:
                handle = self._ask("nvmlDeviceGetHandleByIndex", index)
                found.append(Device(handle, index, self._ask("nvmlDeviceGetUUID", handle)))
            except NoReading:
                continue
        return found

    def slices(self, device: Device) -> list[Device]:
        """The MIG slices of a GPU in MIG mode, in NVML's order."""
        found = []
        for number in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", device.handle)):
            try:
                handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", device.handle, number)
                uuid, instance = self._ask("nvmlDeviceGetUUID", handle), self._ask("nvmlDeviceGetGpuInstanceId", handle)
            except NoReading:  # numbers without a slice
                continue
            found.append(Device(handle, device.index, uuid, device, instance))
        return found

    def find(self, uuid: str) -> Device:
        """The GPU or MIG slice of that UUID."""
        for device in self.devices():
            if device.uuid == uuid:
                return device
            for part in self.slices(device) if uuid.startswith("MIG-") and self.mig(device) else ():
                if part.uuid == uuid:
                    return part
        raise NoReading(f"NVML shows no GPU {uuid}")

    def name(self, device: Device) -> str:
        return self._ask("nvmlDeviceGetName", device.handle)

    def mig(self, device: Device) -> bool:
        """Whether the GPU is in MIG mode (GPUs that have no MIG are not)."""
        try:
            return bool(self._ask("nvmlDeviceGetMigMode", device.handle)[0])
        except NoReading:
            return False

    def compute_mode(self, device: Device) -> str:
        return COMPUTE_MODES.get(self._ask("nvmlDeviceGetComputeMode", (device.parent or device).handle), "unknown")

    def memory_total(self, device: Device) -> int:
        return self._ask("nvmlDeviceGetMemoryInfo", device.handle).total

    def memory_used(self, device: Device) -> int:
        return self._ask("nvmlDeviceGetMemoryInfo", device.handle).used

    def utilization(self, device: Device) -> float:
        return self._ask("nvmlDeviceGetUtilizationRates", device.handle).gpu

    def power(self, device: Device) -> float:
        return self._ask("nvmlDeviceGetPowerUsage", device.handle) / 1000

    def energy(self, device: Device) -> int:
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", device.handle)

    def clock(self, device: Device) -> int:
        return self._ask("nvmlDeviceGetClockInfo", device.handle, self.binding.NVML_CLOCK_SM)

    def temperature(self, device: Device) -> int:
        return self._ask("nvmlDeviceGetTemperature", device.handle, self.binding.NVML_TEMPERATURE_GPU)

    def nvlink_rx(self, device: Device) -> int:
        return self._kib(device, self.binding.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)

    def nvlink_tx(self, device: Device) -> int:
        return self._kib(device, self.binding.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)

    def processes(self, device: Device) -> set[int]:
        """Process ids that hold a context on the GPU, as NVML numbers them."""
        return {process.pid for process in self._ask("nvmlDeviceGetComputeRunningProcesses", device.handle)}

    def link(self, one: Device, other: Device) -> str:
        """How two GPUs reach each other's memory: `nvlink`, `pcie` or `none`."""
        for kind, index in (("nvlink", "NVML_P2P_CAPS_INDEX_NVLINK"), ("pcie", "NVML_P2P_CAPS_INDEX_PCI")):
            status = self._ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, getattr(self.binding, index))
            if status == self.binding.NVML_P2P_STATUS_OK:
                return kind
        return "none"

    def level(self, one: Device, other: Device) -> str:
        """The nearest PCIe ancestor of two GPUs: board, switch, switches, host-bridge, node or system."""
        return LEVELS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle), "unknown")

    def _kib(self, device: Device, field: int) -> int:
        answer = self._ask("nvmlDeviceGetFieldValues", device.handle, [(field, ALL_LINKS)])[0]
        if answer.nvmlReturn != 0:
            raise NoReading(str(self.binding.NVMLError(answer.nvmlReturn)))
        return answer.value.ullVal * 1024

    def _ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self.binding, function, None)
        if call is None:
            raise NoReading(f"this nvidia-ml-py has no {function}")
        try:
            return call(*arguments)
        except self.binding.NVMLError as error:
            raise NoReading(str(error)) from None


class Gpm:
    """GPU performance monitoring of one device: each `read` averages over the time since the read before.

    Raises NoReading where the GPU or the driver has none. `read` gives {name of GPM: %, or the reason it is missing};
    the first read only opens the interval and raises.
    """

    def __init__(self, nvml: Nvml, device: Device) -> None:
        self._nvml, self._device = nvml, device
        if not nvml._ask("nvmlGpmQueryDeviceSupport", (device.parent or device).handle).isSupportedDevice:
            raise NoReading("this GPU has no GPM")
        self._before, self._now = nvml._ask("nvmlGpmSampleAlloc"), nvml._ask("nvmlGpmSampleAlloc")
        self._opened = False
        binding = nvml.binding
        self._request = binding.c_nvmlGpmMetricsGet_t()
        self._request.version, self._request.numMetrics = binding.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        for slot, metric in enumerate(GPM.values()):
            self._request.metrics[slot].metricId = getattr(binding, f"NVML_GPM_METRIC_{metric}")

    def read(self) -> dict[str, float | str]:
        device = self._device
        if device.parent is None:
            self._nvml._ask("nvmlGpmSampleGet", device.handle, self._now)
        else:
            self._nvml._ask("nvmlGpmMigSampleGet", device.parent.handle, device.instance, self._now)
        self._before, self._now = self._now, self._before
        if not self._opened:
            self._opened = True
            raise NoReading("GPM: the first sample has no interval")
        self._request.sample1, self._request.sample2 = self._now, self._before
        self._nvml._ask("nvmlGpmMetricsGet", self._request)
        values: dict[str, float | str] = {}
        for slot, name in enumerate(GPM):
            answer = self._request.metrics[slot]
            if answer.nvmlReturn != 0:
                values[name] = str(self._nvml.binding.NVMLError(answer.nvmlReturn))
            else:
                values[name] = answer.value if math.isfinite(answer.value) else "GPM gave no number"
        return values

    def close(self) -> None:
        for sample in (self._before, self._now):
            self._nvml._ask("nvmlGpmSampleFree", sample)
