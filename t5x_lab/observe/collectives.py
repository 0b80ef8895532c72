"""Counts the collectives of a compiled program and their bytes."""

import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Communication between slices goes through the hosts.
BETWEEN_SLICES = ("send", "recv")
_HOSTS = "xla_megascale_runtime"
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}  # others: 4
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS + BETWEEN_SLICES)})(-start)?\(")
_CALL = re.compile(r"\b(?:calls|body|to_apply|true_computation|false_computation|branch_computations)=\{?([^\s,}]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIPS = re.compile(r"known_trip_count\D*(\d+)")


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Returns `count` and `bytes` of results by kind, per device and run of a program, given as HLO text.

    The kinds are `KINDS`, within a slice, and `BETWEEN_SLICES`, whose bytes leave or reach a device.

    Collectives in a loop are multiplied with its trip count, or the number in its condition. Parts of an asynchronous
    collective have the same kind and channel, and count once. Different kinds may have the same channel. A TPU fusion of an
    all-reduce that keeps one shard counts as a reduce-scatter.
    """
    computations = _computations(hlo)
    totals: dict[str, dict[object, tuple[str, int, int]]] = {}

    def total(name: str) -> dict[object, tuple[str, int, int]]:
        """Returns (kind, count, bytes) by kind and channel, or by line if there is no channel."""
        if name in totals:
            return totals[name]
        collectives_by_key: dict[object, tuple[str, int, int]] = {}
        for number, line in enumerate(computations.get(name, [])):
            if " async-update(" in line or " async-done(" in line:
                continue  # they refer to the computation of their start
            match = _COLLECTIVE.search(line)
            if match and (match[2] in KINDS or _HOSTS in line):
                channel = _CHANNEL.search(line)
                key: object = (match[2], int(channel[1])) if channel else (name, number)
                collectives_by_key[key] = (match[2], 1, _result_bytes(match[1], match[2], asynchronous=bool(match[3])))
            times = _trips(line, computations) if " while(" in line else 1
            for callee in _CALL.findall(line):
                for key, (kind, count, size) in total(callee).items():
                    if "all-reduce-scatter" in callee and kind == "all-reduce":
                        kind, key = "reduce-scatter", ("reduce-scatter", key)
                        size = _result_bytes(line.partition("= ")[2].partition(" fusion(")[0], "", False)
                    collectives_by_key[key] = (kind, times * count, times * size)
        totals[name] = collectives_by_key
        return collectives_by_key

    entry = next((name for name, lines in computations.items() if lines[0].startswith("ENTRY")), "")
    result: dict[str, dict[str, int]] = {}
    for kind, count, size in total(entry).values():
        sums = result.setdefault(kind, {"count": 0, "bytes": 0})
        sums["count"] += count
        sums["bytes"] += size
    return result


def _computations(hlo: str) -> dict[str, list[str]]:
    """Returns the lines of each computation by name, starting with its header."""
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if line.endswith("{") and (head := re.match(r"(?:ENTRY )?(%?[\w.\-]+) \(", line)):
            lines = result[head[1]] = [line]
        else:
            lines.append(line)
    return result


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    if match := _TRIPS.search(line):
        return int(match[1])
    condition = re.search(r"condition=([^\s,]+)", line)
    body = "\n".join(computations[condition[1]]) if condition else ""
    limits = [int(number) for number in re.findall(r"constant\((\d+)\)", body)]
    return max(limits, default=1)


def _result_bytes(shape: str, kind: str, asynchronous: bool) -> int:
    """Returns the bytes of a result shape. The shape of a start is (operands, results, ...), except for an all-reduce."""
    arrays = [_BYTES.get(dtype, 4) * _product(dims) for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape) if dims]
    halves = asynchronous and shape.startswith("(") and kind != "all-reduce"
    return sum(arrays[len(arrays) // 2 :]) if halves else sum(arrays)


def _product(dims: str) -> int:
    result = 1
    for size in dims.split(","):
        result *= int(size)
    return result
