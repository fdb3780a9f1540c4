"""Devices as plain data: memory, bandwidth, FLOP/s by dtype, links. A user adds one as a JSON file or a `Device`.

NOTE [What a device's figures mean]
 1. `memory` is as the data sheet states it, in units of 10^9 bytes. What a driver reports is some percent more: that is
    left to its own context and to the allocator's holes.
 2. `flops`, `bandwidth`, `link` and `network` are peaks of data sheets, dense and in one direction; `tf32` counts
    where torch's float32 precision allows it.
 3. `attained` says which part of a peak a training step attains: at worst, likely, at best. For devices on
    paper these are assumptions, wide enough for what is published (Llama 3 trained at 38-43% of the H100's
    bfloat16 peak, PaLM at 46% of its devices'; single large matrix products attain 60-80%). They make the range
    beside every predicted time.
 4. `overhead` is what an operator costs at least, however small. Its part of `attained` divides it: hosts are half or
    twice as fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from retrograde.measure.formatting import format_bytes, parse_size

THIS = "this"
"""The name of the machine at hand, which is measured."""


class Attained(NamedTuple):
    """Which part of a peak is attained: at worst, likely, at best."""

    worst: float
    likely: float
    best: float


_ON_PAPER = {
    "flops": Attained(0.4, 0.6, 0.8),
    "bandwidth": Attained(0.6, 0.75, 0.9),
    "link": Attained(0.5, 0.7, 0.9),
    "overhead": Attained(0.5, 1.0, 2.0),
}


@dataclass(frozen=True)
class Device:
    """A device to plan for. See NOTE [What a device's figures mean].

    Args:
        name: what to call it.
        memory: bytes.
        bandwidth: of its memory, in bytes per second.
        flops: floating-point operations per second of matrix products, by the name of the dtype (and "tf32").
        link: bytes per second to another device of the same node, in one direction.
        network: bytes per second to a device of another node.
        per_node: how many devices a node has.
        overhead: seconds that an operator takes at least.
        attained: which parts of the peaks are attained, for "flops", "bandwidth", "link" and "overhead".
        is_cpu: whether operators run on the host.
        title, sources: what it is in words, and where the figures are from.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    link: float = 32e9
    network: float = 12.5e9
    per_node: int = 8
    overhead: float = 4e-6
    attained: Mapping[str, Attained] = field(default_factory=dict)
    is_cpu: bool = False
    title: str = ""
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        attained = {**_ON_PAPER, **{name: self._attained(name, parts) for name, parts in self.attained.items()}}
        object.__setattr__(self, "attained", attained)
        for name in ("memory", "bandwidth", "link", "network", "per_node", "overhead"):
            if not _is_positive(value := getattr(self, name)):
                raise ValueError(f"The device {self.name!r} has {name}={value!r}; give a number above 0.")
        if not _are_rates(self.flops):
            raise ValueError(
                f"The device {self.name!r} has flops={self.flops!r}; give a number above 0 for each dtype it "
                "computes in, such as {'float32': 67e12, 'bfloat16': 989e12}."
            )

    def _attained(self, name: str, parts: Any) -> Attained:
        is_triple = isinstance(parts, (tuple, list)) and len(parts) == 3 and all(map(_is_positive, parts))
        if name not in _ON_PAPER or not is_triple or sorted(parts) != [*parts]:
            raise ValueError(
                f"The device {self.name!r} has attained[{name!r}]={parts!r}; give three numbers above 0 (worst, "
                f"likely, best, in this order) for {', '.join(map(repr, _ON_PAPER))}."
            )
        return Attained(*parts)

    def limit(self, given: int | str | None) -> int:
        """The bytes of a budget for this device: all of its memory, if none is given."""
        size = self.memory if given is None else parse_size(given)
        if size > self.memory:
            raise ValueError(
                f"A budget of {format_bytes(size)} is more than {self.name} has: {format_bytes(self.memory)} "
                f"({self.memory} bytes). Give less, or none for all of it, or describe a device that has more in a "
                "JSON file."
            )
        return size

    def rate(self, dtype: str) -> float:
        """FLOP/s in a dtype; of one that is not listed, those of float32, or the least there are."""
        return self.flops.get(dtype) or self.flops.get("float32") or min(self.flops.values())

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> Device:
        """A device from JSON; `memory` may be a text such as "24GB"."""
        unknown = set(data) - {f.name for f in fields(cls)}
        missing = {"memory", "bandwidth", "flops"} - set(data)
        if unknown or missing:
            wrong = [f"{sorted(unknown)} are not known"] if unknown else []
            wrong += [f"{sorted(missing)} are missing"] if missing else []
            raise ValueError(
                f"The device {name!r}: {' and '.join(wrong)}. A device has "
                f"{', '.join(f.name for f in fields(cls) if f.name != 'name')}."
            )
        values = {**data, "name": name, "memory": parse_size(data["memory"]), "sources": tuple(data.get("sources", ()))}
        return cls(**values)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _are_rates(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(map(_is_positive, value.values()))


def known_devices() -> dict[str, Device]:
    """The devices that come with the package, by name."""
    text = resources.files(__package__).joinpath("devices.json").read_text(encoding="utf-8")
    return {name: Device.from_dict(name, data) for name, data in json.loads(text).items()}


def device_named(on: str | Device) -> Device:
    """The device of a name, of a JSON file with one device in it, or the machine at hand ("this"), measured."""
    if isinstance(on, Device):
        return on
    if on == THIS:
        from .this_machine import measured_machine

        return measured_machine()
    if on.endswith(".json"):
        return _from_file(Path(on))
    known_by_name = known_devices()
    if on not in known_by_name:
        raise ValueError(
            f"on={on!r} is not known; choose one of {', '.join(known_by_name)}, {THIS!r} for this machine, or a JSON "
            "file that describes a device (memory, bandwidth, flops)."
        )
    return known_by_name[on]


def _from_file(path: Path) -> Device:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"on={str(path)!r}: there is no such file to read a device from ({error}).") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"on={str(path)!r} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"on={str(path)!r} has a {type(data).__name__}, where a device's figures belong, by name.")
    return Device.from_dict(data.pop("name", path.stem), data)
